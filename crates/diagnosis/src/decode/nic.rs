//! Lines of NIC drivers: their driver and device. The catalogue's patterns decide which lines
//! are worth an event.

use memchr::memmem;

use super::text;
use crate::catalog::NicDriver;

/// Most NICs whose names are kept: far above any machine, with virtual functions.
pub const MAX_NICS: usize = 4096;
/// Longest accepted device name, in bytes.
const MAX_DEVICE_BYTES: usize = 64;

/// A line of a NIC driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicLine<'a> {
    /// Driver that logged the line.
    pub driver: NicDriver,
    /// PCI address with function, as printed: `0000:9a:00.0`.
    pub pci: Option<&'a str>,
    /// RDMA device such as `rdmap0s6`, in lines that name it instead of the address.
    pub device: Option<&'a str>,
    /// The whole message, with driver and device.
    pub message: &'a [u8],
}

/// Returns true if a message starts like a line of one of these drivers.
pub(super) fn is_of_a_driver(message: &[u8]) -> bool {
    match message.first() {
        Some(b'm') => message.starts_with(b"mlx5_core "),
        Some(b'N') => message.starts_with(b"NETDEV WATCHDOG: "),
        Some(b'e') => message.starts_with(b"efa "),
        Some(b'i') => message.starts_with(b"infiniband "),
        _ => false,
    }
}

/// Parses a message that starts like a line of one of these drivers.
pub(super) fn line(message: &[u8]) -> Option<NicLine<'_>> {
    let mut words = message
        .splitn(4, |byte| *byte == b' ')
        .map(|word| text(word).trim_end_matches(':'));
    let (first, second, third) = (words.next()?, words.next()?, words.next().unwrap_or(""));
    let (driver, pci, device) = match first {
        "mlx5_core" => (NicDriver::Mlx5, is_function(second).then_some(second), None),
        // NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 0 timed out
        "NETDEV" if memmem::find(message, b" (mlx5_core)").is_some() => {
            (NicDriver::Mlx5, None, Some(third))
        }
        "efa" => (NicDriver::Efa, is_function(second).then_some(second), None),
        "infiniband" if second.starts_with("mlx5") => (NicDriver::Mlx5, None, Some(second)),
        "infiniband" if second.starts_with("rdmap") || second.starts_with("efa_") => {
            (NicDriver::Efa, None, Some(second))
        }
        _ => return None,
    };
    let plausible = |name: &&str| {
        !name.is_empty()
            && name.len() <= MAX_DEVICE_BYTES
            && name.bytes().all(|byte| byte.is_ascii_graphic())
    };
    Some(NicLine {
        driver,
        pci,
        device: device.filter(plausible),
        message,
    })
}

/// Returns true if `text` is the PCI address of a function: `0000:9a:00.0`.
fn is_function(text: &str) -> bool {
    text.contains('.') && super::is_pci(text)
}
