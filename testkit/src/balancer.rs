//! A TCP load balancer: replicas behind one address, as a Service has them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

/// A load balancer on a free port of this machine. It ends on drop.
pub struct Balancer {
    address: SocketAddr,
    replicas: Arc<Mutex<Vec<SocketAddr>>>,
    accepting: AbortHandle,
}

// === impl Balancer ===

impl Balancer {
    /// Starts a balancer without replicas. Must be called within a tokio runtime.
    pub async fn start() -> anyhow::Result<Self> {
        Self::start_on(Ipv4Addr::LOCALHOST.into()).await
    }

    /// Starts a balancer on another address of this machine.
    pub async fn start_on(address: IpAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((address, 0)).await?;
        let address = listener.local_addr()?;
        let replicas: Arc<Mutex<Vec<SocketAddr>>> = Arc::default();
        let known = Arc::clone(&replicas);
        let accepting = tokio::spawn(async move {
            for turn in 0_usize.. {
                let Ok((client, _)) = listener.accept().await else {
                    return;
                };
                let mut replicas = known.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let count = replicas.len().max(1);
                replicas.rotate_left(turn % count);
                tokio::spawn(connect(client, replicas));
            }
        });
        Ok(Self {
            address,
            replicas,
            accepting: accepting.abort_handle(),
        })
    }

    /// Returns the address of the balancer.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sends new connections to these replicas from now on, in turn. Open connections stay.
    pub fn send_to(&self, replicas: &[SocketAddr]) {
        let mut known = self.replicas.lock().unwrap_or_else(PoisonError::into_inner);
        *known = replicas.to_vec();
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Connects a client to the first replica that accepts the connection.
async fn connect(mut client: TcpStream, replicas: Vec<SocketAddr>) {
    for replica in replicas {
        if let Ok(mut server) = TcpStream::connect(replica).await {
            // The connection ends when either side does.
            drop(tokio::io::copy_bidirectional(&mut client, &mut server).await);
            return;
        }
    }
}
