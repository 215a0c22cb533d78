//! Lines of NIC drivers: their driver and device. The patterns of the catalogue say which of them
//! are worth an event.

use memchr::memmem;

use super::text;
use crate::catalog::NicDriver;

/// Most NICs whose names are remembered: far above any machine, with virtual functions.
pub const MAX_NICS: usize = 4096;
/// Longest device name that is believed (bytes).
const MAX_DEVICE_BYTES: usize = 64;

/// A line of a NIC's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicLine<'a> {
    /// The driver.
    pub driver: NicDriver,
    /// PCI address with function, as printed: `0000:9a:00.0`.
    pub pci: Option<&'a str>,
    /// The RDMA device, where the line names that instead: `rdmap0s6`.
    pub device: Option<&'a str>,
    /// The whole message.
    pub message: &'a [u8],
}

/// Returns whether a message begins like one of these drivers'.
pub(super) fn is_of_a_driver(message: &[u8]) -> bool {
    match message.first() {
        Some(b'm') => message.starts_with(b"mlx5_core "),
        Some(b'N') => message.starts_with(b"NETDEV WATCHDOG: "),
        Some(b'e') => message.starts_with(b"efa "),
        Some(b'i') => message.starts_with(b"infiniband "),
        _ => false,
    }
}

/// Takes a message apart that begins like one of these drivers'.
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

/// Returns whether `text` is the PCI address of a function: `0000:9a:00.0`.
fn is_function(text: &str) -> bool {
    text.contains('.') && super::is_pci(text)
}
