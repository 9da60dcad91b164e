//! An HTTP server whose keep-alive timeouts are twheel's: `cargo run -p twheel-client --example http`

use std::{convert::Infallible, time::Duration};

use http_body_util::Full;
use hyper::{Request, Response, body::Bytes, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use twheel_client::{Offload, Outcome};

/// For how long a connection may have no data, in either direction.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let address = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "[::]:7000".to_owned());
    let listener = TcpListener::bind(&address).await?;
    println!("http://{address}/");
    let offload = Offload::new()?;
    loop {
        let (stream, _) = listener.accept().await?;
        let offload = offload.clone();
        tokio::spawn(async move {
            if let Err(error) = serve(&offload, stream).await {
                eprintln!("{error}");
            }
        });
    }
}

/// Serves a connection until it has been idle for so long: also one on which no request, or half of
/// one, has come.
async fn serve(offload: &Offload, stream: TcpStream) -> std::io::Result<()> {
    let peer = stream.peer_addr()?;
    let idle = offload.start(&stream, KEEP_ALIVE).await?;
    let connection =
        http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(hello));
    tokio::pin!(connection);
    tokio::select! {
        served = connection.as_mut() => return served.map_err(std::io::Error::other),
        ended = idle.expired() => {
            let ended = ended?;
            if ended.outcome == Outcome::Expired {
                println!("{peer} was idle for {:.1?}", ended.idle);
            }
        }
    }
    // No data has passed for the whole timeout: a response on its way is not cut off, but one that takes
    // longer to make would be.
    Ok(())
}

async fn hello(_: Request<hyper::body::Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("hello\n")))
}
