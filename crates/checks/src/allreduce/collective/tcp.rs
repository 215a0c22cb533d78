//! Ring of TCP connections between the members, on the processor: each member sends to the next
//! one, as in NCCL's ring, so that a slow path shows in the bandwidth. For trying out gangs
//! without GPUs.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

use super::super::messages::Test;
use super::Collective;
use crate::numbers::{self, MOST_COMPARED, Numbers};
use crate::worker::{Measured, Operation, SeenGpu, WorkerFailure};

/// Pause before a member that does not listen yet is called again.
const CALL_AGAIN: Duration = Duration::from_millis(50);
/// Time for a caller to name its test.
const ANSWER: Duration = Duration::from_secs(2);
/// Number that fills messages whose contents do not matter.
const FILLING: f32 = 0.75;

/// Mark of a test, exchanged by members.
type Mark = [u8; 8];

/// Endpoint of this member for rings.
pub(in super::super) struct Tcp {
    listener: TcpListener,
    endpoint: SocketAddr,
}

/// Connections of a member of a ring.
struct Ring {
    place: usize,
    members: usize,
    next: TcpStream,
    previous: TcpStream,
}

// === impl Tcp ===

impl Tcp {
    /// Listens on an address of this machine.
    pub(in super::super) async fn listen(address: IpAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((address, 0)).await?;
        Ok(Self {
            endpoint: listener.local_addr()?,
            listener,
        })
    }

    /// Connects to the next member, and accepts the connection of the previous one. The
    /// accepting member answers with the mark of the test: a member that is still in the
    /// previous test closes the connection, and is called again.
    async fn join(&self, test: &Test) -> io::Result<Ring> {
        let members = test.endpoints.len();
        let next = (test.place + 1) % members.max(1);
        let next = test.endpoints.get(next).copied().flatten();
        let next = next.ok_or_else(|| io::Error::other("the next member cannot be reached"))?;
        let mark = test.step.to_be_bytes();
        let call = async {
            loop {
                match call(next, mark).await {
                    Ok(stream) => return Ok::<_, io::Error>(stream),
                    Err(_) => tokio::time::sleep(CALL_AGAIN).await,
                }
            }
        };
        let accept = async {
            loop {
                let (mut stream, _) = self.listener.accept().await?;
                // Other callers belong to another test, or are strangers, which may send
                // nothing.
                let answered = tokio::time::timeout(ANSWER, answer(&mut stream, mark)).await;
                if answered.is_ok_and(|answered| answered.is_ok()) {
                    return Ok::<_, io::Error>(stream);
                }
            }
        };
        let (next, previous) = tokio::try_join!(call, accept)?;
        Ok(Ring {
            place: test.place,
            members,
            next,
            previous,
        })
    }

    async fn measure(&self, test: &Test) -> Result<Vec<Measured>, WorkerFailure> {
        let mut ring = self.join(test).await.map_err(|error| broken(&error))?;
        ring.check_sums(test).await?;
        if ring.members < 2 {
            // Nothing is sent, so there is no bandwidth.
            return Ok(Vec::new());
        }
        let benchmark = &test.benchmark;
        let mut measured = Vec::new();
        for bytes in &benchmark.sizes {
            let count = usize::try_from(bytes / 4).unwrap_or_default();
            let mut numbers = vec![FILLING; count];
            ring.reduce(&mut numbers, benchmark.operation, benchmark.warmups)
                .await?;
            let begin = Instant::now();
            let times = benchmark.iterations.max(1);
            ring.reduce(&mut numbers, benchmark.operation, times)
                .await?;
            measured.push(Measured {
                bytes: bytes / 4 * 4,
                seconds: begin.elapsed().as_secs_f64() / f64::from(times),
            });
        }
        Ok(measured)
    }
}

impl Collective for Tcp {
    async fn devices(&mut self, _: Instant) -> Result<(u32, Vec<SeenGpu>), WorkerFailure> {
        Ok((1, Vec::new()))
    }

    fn endpoint(&self) -> Option<SocketAddr> {
        Some(self.endpoint)
    }

    async fn lead(&mut self, _: Instant) -> Result<String, WorkerFailure> {
        Ok("ring".to_owned())
    }

    async fn test(&mut self, test: &Test, until: Instant) -> Result<Vec<Measured>, WorkerFailure> {
        let begin = Instant::now();
        let measured = tokio::time::timeout_at(until, self.measure(test)).await;
        measured.unwrap_or_else(|_| {
            Err(WorkerFailure::Late {
                seconds: begin.elapsed().as_secs(),
                doing: "in a ring of TCP connections".to_owned(),
            })
        })
    }

    fn without_topology(&mut self) {}

    fn over(&mut self) {}
}

/// Connects to a member for the test with this mark.
async fn call(member: SocketAddr, mark: Mark) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(member).await?;
    stream.set_nodelay(true)?;
    stream.write_all(&mark).await?;
    let mut answer = Mark::default();
    stream.read_exact(&mut answer).await?;
    Ok(stream)
}

/// Answers a caller for the test with this mark.
async fn answer(stream: &mut TcpStream, mark: Mark) -> io::Result<()> {
    let mut received = Mark::default();
    stream.read_exact(&mut received).await?;
    if received != mark {
        return Err(io::Error::other("it calls for another test"));
    }
    stream.write_all(&mark).await
}

// === impl Ring ===

impl Ring {
    async fn check_sums(&mut self, test: &Test) -> Result<(), WorkerFailure> {
        let largest = test
            .benchmark
            .sizes
            .iter()
            .copied()
            .max()
            .unwrap_or_default();
        let count = usize::try_from(largest.min(MOST_COMPARED) / 4).unwrap_or_default();
        let known = Numbers::of(test.ranks);
        let mut numbers = floats(&known.brought(test.first, count));
        self.reduce(&mut numbers, Operation::Sum, 1).await?;
        let place = format!("place {} of a ring", self.place);
        numbers::compare(&known.sums(count), &bytes(&numbers))
            .map_err(WorkerFailure::of_gpu(&place))
    }

    /// Reduces several times in a row.
    async fn reduce(
        &mut self,
        numbers: &mut [f32],
        operation: Operation,
        times: u32,
    ) -> Result<(), WorkerFailure> {
        for _ in 0..times {
            let reduced = self.all_reduce(numbers, operation).await;
            reduced.map_err(|error| broken(&error))?;
        }
        Ok(())
    }

    /// Sends a part to the next member, receives one from the previous member and adds it,
    /// until each member has one part of the result; then distributes the results.
    async fn all_reduce(&mut self, numbers: &mut [f32], operation: Operation) -> io::Result<()> {
        let steps = self.members - 1;
        for step in 0..steps {
            let taken = self
                .exchange(numbers, self.place + self.members - step)
                .await?;
            let at = self.part(numbers.len(), self.place + self.members - step - 1);
            let own = numbers.get_mut(at).unwrap_or_default();
            for (own, taken) in own.iter_mut().zip(taken) {
                *own = match operation {
                    Operation::Sum | Operation::Avg => *own + taken,
                    Operation::Prod => *own * taken,
                    Operation::Min => own.min(taken),
                    Operation::Max => own.max(taken),
                };
            }
        }
        for step in 0..steps {
            let taken = self
                .exchange(numbers, self.place + self.members + 1 - step)
                .await?;
            let at = self.part(numbers.len(), self.place + self.members - step);
            let own = numbers.get_mut(at).unwrap_or_default();
            own.copy_from_slice(&taken);
        }
        if operation == Operation::Avg {
            let members = u16::try_from(self.members).unwrap_or(u16::MAX);
            for number in numbers {
                *number /= f32::from(members);
            }
        }
        Ok(())
    }

    /// Sends a part, and receives the one before it.
    async fn exchange(&mut self, numbers: &[f32], part: usize) -> io::Result<Vec<f32>> {
        let sent = bytes(
            numbers
                .get(self.part(numbers.len(), part))
                .unwrap_or_default(),
        );
        let room = self.part(numbers.len(), part + self.members - 1).len() * 4;
        let mut taken = vec![0; room];
        let (sent, read) = tokio::join!(
            self.next.write_all(&sent),
            self.previous.read_exact(&mut taken)
        );
        sent?;
        read?;
        Ok(floats(&taken))
    }

    /// Returns the range of a part.
    fn part(&self, count: usize, part: usize) -> std::ops::Range<usize> {
        let part = part % self.members;
        part * count / self.members..(part + 1) * count / self.members
    }
}

/// Converts a broken connection into NCCL's remote error.
fn broken(error: &io::Error) -> WorkerFailure {
    WorkerFailure::Nccl {
        code: 6,
        text: format!("a way to another member is broken: {error}"),
    }
}

fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_ne_bytes())
        .collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let chunks = bytes.as_chunks::<4>().0.iter();
    chunks.map(|chunk| f32::from_ne_bytes(*chunk)).collect()
}
