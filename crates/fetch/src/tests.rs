//! Tests with a hostile server and a hostile name server.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use crate::resolver::{Resolver, Resolving};
use crate::{Config, FetchError, Fetcher};

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const LIMIT: usize = 100_000;

/// Accepts a file of any size.
fn anything(_: usize) -> bool {
    true
}

/// Replaces the check for public addresses: only the test server's address is allowed.
fn only_here(address: IpAddr) -> bool {
    address == HERE
}

/// A name server that returns its answers for a name one after another, and repeats the last one.
#[derive(Default)]
struct Names {
    answers: HashMap<&'static str, Vec<Vec<IpAddr>>>,
    asked: Arc<AtomicUsize>,
}

impl Names {
    fn of(answers: &[(&'static str, &[&str])]) -> Self {
        let addresses =
            |text: &&str| text.split_whitespace().map(|word| word.parse().unwrap()).collect();
        let answers =
            answers.iter().map(|(name, all)| (*name, all.iter().map(addresses).collect()));
        Self { answers: answers.collect(), asked: Arc::default() }
    }
}

impl Resolver for Names {
    fn resolve(&self, name: &str) -> Resolving {
        let number = self.asked.fetch_add(1, Ordering::Relaxed);
        let found = self.answers.get(name).and_then(|all| all.get(number).or(all.last())).cloned();
        Box::pin(async move { found.ok_or_else(|| io::ErrorKind::NotFound.into()) })
    }
}

fn config() -> Config {
    let domains = [
        "images.test",
        "private.test",
        "both.test",
        "turning.test",
        "nowhere.test",
        "127.0.0.2",
        "localhost",
    ];
    Config {
        allowed_media_domains: domains.map(String::from).to_vec(),
        timeout: Duration::from_millis(500),
        max_bytes: LIMIT,
        ..Config::default()
    }
}

fn names() -> Names {
    Names::of(&[
        ("images.test", &["127.0.0.1"]),
        ("localhost", &["127.0.0.1"]),
        ("private.test", &["10.0.0.1"]),
        ("both.test", &["127.0.0.1 10.0.0.1"]),
        ("turning.test", &["127.0.0.1", "10.0.0.1"]),
        ("nowhere.test", &[""]),
    ])
}

fn fetcher_of(config: &Config, names: Names) -> Fetcher {
    Fetcher::build(config, Box::new(names), only_here, RootCertStore::empty()).unwrap()
}

fn fetcher() -> Fetcher {
    fetcher_of(&config(), names())
}

/// Starts a server that calls `answer` for the first request of each connection. Returns the port.
async fn serve<F, R>(answer: F) -> u16
where
    F: Fn(TcpStream, String) -> R + Send + Sync + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind((HERE, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let head = read_head(&mut stream).await;
            tokio::spawn(answer(stream, head));
        }
    });
    port
}

async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8(head).unwrap()
}

async fn say(stream: &mut (impl AsyncWrite + Unpin), text: &str) {
    // The client may have closed the connection already.
    let _ = stream.write_all(text.as_bytes()).await;
}

/// Starts a server that sends the same text for all requests. Returns the port.
async fn saying(text: &'static str) -> u16 {
    serve(move |mut stream, _| async move { say(&mut stream, text).await }).await
}

/// Fetches `http://images.test` from a server that sends `text`.
async fn fetched(text: &'static str) -> Result<String, FetchError> {
    let port = saying(text).await;
    let file = fetcher().fetch(&format!("http://images.test:{port}/"), anything).await?;
    Ok(String::from_utf8(file.to_vec()).unwrap())
}

#[tokio::test]
async fn a_file_is_fetched_and_little_is_said() {
    let (sender, mut heads) = tokio::sync::mpsc::unbounded_channel();
    let port = serve(move |mut stream, head| {
        sender.send(head).unwrap();
        async move { say(&mut stream, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfile").await }
    })
    .await;
    let url = format!("http://images.test:{port}/a%20b?c=d#fragment");
    assert_eq!(fetcher().fetch(&url, anything).await.unwrap(), "file");
    let head = heads.recv().await.unwrap();
    assert!(head.starts_with("GET /a%20b?c=d HTTP/1.1\r\n"), "{head}");
    assert!(head.contains(&format!("host: images.test:{port}\r\n")), "{head}");
    assert!(head.contains("accept-encoding: identity\r\n"), "{head}");
    assert!(!head.contains("cookie") && !head.contains("referer"), "{head}");
}

#[tokio::test]
async fn a_body_in_chunks_and_one_until_the_end() {
    let chunked =
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nfi\r\n2\r\nle\r\n0\r\n\r\n";
    assert_eq!(fetched(chunked).await.unwrap(), "file");
    assert_eq!(fetched("HTTP/1.1 200 OK\r\n\r\nfile").await.unwrap(), "file");
}

#[tokio::test]
async fn urls_that_are_not_asked() {
    let refused = async |url: &str| fetcher().fetch(url, anything).await.unwrap_err();
    assert_eq!(refused("no url").await, FetchError::BadUrl);
    assert_eq!(
        refused(&format!("http://images.test/{}", "a".repeat(9000))).await,
        FetchError::BadUrl
    );
    assert_eq!(refused("ftp://images.test/a").await, FetchError::Scheme("ftp".into()));
    assert_eq!(refused("gopher://images.test/").await, FetchError::Scheme("gopher".into()));
    assert_eq!(refused("http://me@images.test/").await, FetchError::Credentials);
    assert_eq!(refused("http://:word@images.test/").await, FetchError::Credentials);
    assert_eq!(refused("http://images.test@10.0.0.1/").await, FetchError::Credentials);
    assert_eq!(refused("http://example.com/").await, FetchError::Domain("example.com".into()));
    assert_eq!(refused("http://nowhere.test/").await, FetchError::NoAddress("nowhere.test".into()));
    assert_eq!(refused("file:///etc/passwd").await, FetchError::NoLocalFiles);
    assert_eq!(FetchError::Port(22).to_string(), "port 22 is not asked: 80 and 443 are");
}

#[tokio::test]
async fn without_a_list_the_ports_are_the_webs() {
    let open = Config { allowed_media_domains: Vec::new(), ..config() };
    let refused =
        async |url: &str| fetcher_of(&open, names()).fetch(url, anything).await.unwrap_err();
    assert_eq!(refused("http://images.test:6379/").await, FetchError::Port(6379));
    assert_eq!(refused("https://images.test:22/").await, FetchError::Port(22));
    // These URLs pass the check of ports. Only their addresses are refused.
    assert_eq!(refused("http://private.test/").await, FetchError::NotPublic("private.test".into()));
    assert_eq!(
        refused("https://private.test:80/").await,
        FetchError::NotPublic("private.test".into())
    );
}

#[tokio::test]
async fn turned_off_nothing_is_resolved() {
    let (names, off) = (names(), Config { remote_media: false, ..config() });
    let asked = Arc::clone(&names.asked);
    let error = fetcher_of(&off, names).fetch("http://images.test/", anything).await.unwrap_err();
    assert_eq!((error, asked.load(Ordering::Relaxed)), (FetchError::Off, 0));
}

/// Addresses are checked in every notation.
#[tokio::test]
async fn special_addresses_in_urls() {
    let fetcher =
        Fetcher::new(&Config { timeout: Duration::from_millis(500), ..Config::default() }).unwrap();
    for host in [
        "127.0.0.1",
        "127.1",
        "0x7f.1",
        "2130706433",
        "0177.0.0.1",
        "0",
        "169.254.169.254",
        "10.1.2.3",
        "192.168.0.1",
        "172.16.0.1",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "192.0.2.1",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::a9fe:a9fe]",
        "[2002:7f00:1::]",
        "[fe80::1]",
        "[fd00::1]",
        "[ff02::1]",
        "127.0.0.1.",
        "１２７.0.0.1",
    ] {
        let error = fetcher.fetch(&format!("http://{host}/"), anything).await.unwrap_err();
        assert!(matches!(error, FetchError::NotPublic(_)), "{host}: {error}");
    }
    let open = Fetcher::new(&Config { media_allow_private: true, ..Config::default() }).unwrap();
    let error = open.fetch("http://169.254.169.254/latest/meta-data", anything).await.unwrap_err();
    assert_eq!(error, FetchError::NotPublic("169.254.169.254".into()));
}

/// The name `localhost` is resolved by the machine's hosts file.
#[tokio::test]
async fn a_private_network_is_asked_where_that_is_allowed() {
    let port = saying("HTTP/1.1 200 OK\r\n\r\nfile").await;
    let url = format!("http://localhost:{port}/");
    let allow = Config {
        media_allow_private: true,
        allowed_media_domains: vec!["localhost".into()],
        ..Config::default()
    };
    assert_eq!(Fetcher::new(&allow).unwrap().fetch(&url, anything).await.unwrap(), "file");
    let refuse = Config { media_allow_private: false, ..allow };
    let error = Fetcher::new(&refuse).unwrap().fetch(&url, anything).await.unwrap_err();
    assert_eq!(error, FetchError::NotPublic("localhost".into()));
}

#[tokio::test]
async fn one_private_address_among_several_is_enough() {
    let port = saying("HTTP/1.1 200 OK\r\n\r\nfile").await;
    let error = fetcher().fetch(&format!("http://both.test:{port}/"), anything).await.unwrap_err();
    assert_eq!(error, FetchError::NotPublic("both.test".into()));
}

/// The name server returns one address for the lookup that is checked, and another address for the
/// next lookup.
#[tokio::test]
async fn the_address_that_was_checked_is_dialled() {
    let port = saying("HTTP/1.1 200 OK\r\n\r\nfile").await;
    let names = names();
    let asked = Arc::clone(&names.asked);
    let fetcher = fetcher_of(&config(), names);
    let url = format!("http://turning.test:{port}/");
    assert_eq!(fetcher.fetch(&url, anything).await.unwrap(), "file");
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    assert_eq!(
        fetcher.fetch(&url, anything).await.unwrap_err(),
        FetchError::NotPublic("turning.test".into())
    );
}

/// Fetches `/`, which redirects to `to`. In `to`, `PORT` is replaced by the server's port. Every
/// other path returns a file.
async fn redirected(to: &'static str) -> Result<String, FetchError> {
    let port = serve(move |mut stream, head| async move {
        let port = stream.local_addr().unwrap().port();
        let answer = if head.starts_with("GET / ") {
            let to = to.replace("PORT", &port.to_string());
            format!("HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n")
        } else {
            "HTTP/1.1 200 OK\r\n\r\nfile".to_owned()
        };
        say(&mut stream, &answer).await;
    })
    .await;
    let file = fetcher().fetch(&format!("http://images.test:{port}/"), anything).await?;
    Ok(String::from_utf8(file.to_vec()).unwrap())
}

#[tokio::test]
async fn redirects_are_checked_like_the_first() {
    assert_eq!(redirected("/file").await.unwrap(), "file");
    assert_eq!(redirected("http://localhost:PORT/file").await.unwrap(), "file");
    let refused = async |to| redirected(to).await.unwrap_err();
    assert_eq!(
        refused("http://127.0.0.2:PORT/file").await,
        FetchError::NotPublic("127.0.0.2".into())
    );
    assert_eq!(refused("http://private.test/").await, FetchError::NotPublic("private.test".into()));
    assert_eq!(refused("http://127.0.0.1:PORT/file").await, FetchError::Domain("127.0.0.1".into()));
    assert_eq!(refused("http://u:p@images.test:PORT/file").await, FetchError::Credentials);
    assert_eq!(refused("file:///etc/passwd").await, FetchError::Scheme("file".into()));
    assert_eq!(refused("http://[").await, FetchError::BadRedirect("images.test".into()));
    assert_eq!(refused("/").await, FetchError::Redirects(3));
}

#[tokio::test]
async fn three_redirects_are_followed_and_no_fourth() {
    async fn hops(count: usize) -> Result<String, FetchError> {
        let port = serve(move |mut stream, head| async move {
            let number: usize = head[5..].split(' ').next().unwrap().parse().unwrap();
            let answer = match number {
                0 => "HTTP/1.1 200 OK\r\n\r\nfile".to_owned(),
                _ => format!("HTTP/1.1 307 To\r\nLocation: /{}\r\n\r\n", number - 1),
            };
            say(&mut stream, &answer).await;
        })
        .await;
        let file = fetcher().fetch(&format!("http://images.test:{port}/{count}"), anything).await?;
        Ok(String::from_utf8(file.to_vec()).unwrap())
    }
    assert_eq!(hops(3).await.unwrap(), "file");
    assert_eq!(hops(4).await.unwrap_err(), FetchError::Redirects(3));
}

#[tokio::test]
async fn sizes_are_checked_before_and_while_a_body_is_read() {
    let huge = "HTTP/1.1 200 OK\r\nContent-Length: 9223372036854775807\r\n\r\n";
    assert_eq!(fetched(huge).await.unwrap_err(), FetchError::TooLarge(LIMIT));
    let port = serve(|mut stream, _| async move {
        say(&mut stream, "HTTP/1.1 200 OK\r\n\r\n").await;
        while stream.write_all(&[b'a'; 4096]).await.is_ok() {}
    })
    .await;
    let endless = fetcher().fetch(&format!("http://images.test:{port}/"), anything).await;
    assert_eq!(endless.unwrap_err(), FetchError::TooLarge(LIMIT));
    let exact = |length: usize| {
        serve(move |mut stream, _| async move {
            say(
                &mut stream,
                &format!(
                    "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{}",
                    "a".repeat(length)
                ),
            )
            .await;
        })
    };
    let fetch =
        async |port: u16| fetcher().fetch(&format!("http://images.test:{port}/"), anything).await;
    assert_eq!(fetch(exact(LIMIT).await).await.unwrap().len(), LIMIT);
    assert_eq!(fetch(exact(LIMIT + 1).await).await.unwrap_err(), FetchError::TooLarge(LIMIT));
}

#[tokio::test]
async fn slow_servers_are_given_up() {
    let silent = serve(|stream, _| async move {
        std::future::pending::<()>().await;
        drop(stream);
    })
    .await;
    let dripping = serve(|mut stream, _| async move {
        say(&mut stream, "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n").await;
        loop {
            say(&mut stream, "a").await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    for port in [silent, dripping] {
        let error =
            fetcher().fetch(&format!("http://images.test:{port}/"), anything).await.unwrap_err();
        assert_eq!(error, FetchError::TooSlow(Duration::from_millis(500)));
    }
}

#[tokio::test]
async fn a_slow_name_server_is_given_up() {
    struct Silent;
    impl Resolver for Silent {
        fn resolve(&self, _: &str) -> Resolving {
            Box::pin(std::future::pending())
        }
    }
    let fetcher = Fetcher::build(&config(), Box::new(Silent), only_here, RootCertStore::empty());
    let error = fetcher.unwrap().fetch("http://images.test/", anything).await.unwrap_err();
    assert_eq!(error, FetchError::TooSlow(Duration::from_millis(500)));
}

#[tokio::test]
async fn answers_that_are_no_files() {
    let refused = async |text| fetched(text).await.unwrap_err();
    let status = FetchError::Status { host: "images.test".into(), status: 404 };
    assert_eq!(refused("HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n").await, status);
    assert_eq!(status.to_string(), "images.test answered with status 404");
    let partial = "HTTP/1.1 206 Part\r\nContent-Length: 1\r\n\r\na";
    assert!(matches!(refused(partial).await, FetchError::Status { status: 206, .. }));
    let encoded = "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\na";
    assert_eq!(refused(encoded).await, FetchError::Encoded("images.test".into()));
    let broken = FetchError::Broken("images.test".into());
    assert_eq!(refused("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nfile").await, broken);
    assert_eq!(refused("SSH-2.0-OpenSSH\r\n").await, broken);
    assert_eq!(refused("").await, broken);
    let redirect = "HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n";
    assert_eq!(refused(redirect).await, FetchError::BadRedirect("images.test".into()));
}

#[tokio::test]
async fn nobody_listens() {
    let free = TcpListener::bind((HERE, 0)).await.unwrap().local_addr().unwrap().port();
    let error =
        fetcher().fetch(&format!("http://images.test:{free}/"), anything).await.unwrap_err();
    assert_eq!(error, FetchError::Unreachable("images.test".into()));
}

#[tokio::test]
async fn certificates_are_checked() {
    let pem = include_bytes!("../../http/tests/data/certificate.pem");
    let certificate = CertificateDer::from_pem_slice(pem).unwrap();
    let key =
        PrivateKeyDer::from_pem_slice(include_bytes!("../../http/tests/data/key.pem")).unwrap();
    let tls = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let listener = TcpListener::bind((HERE, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            if let Ok(mut stream) = acceptor.accept(stream).await {
                read_head(&mut stream).await;
                say(&mut stream, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfile").await;
                let _ = stream.shutdown().await;
            }
        }
    });
    let mut roots = RootCertStore::empty();
    roots.add(certificate).unwrap();
    let trusting = Fetcher::build(&config(), Box::new(names()), only_here, roots).unwrap();
    let url = format!("https://localhost:{port}/");
    assert_eq!(trusting.fetch(&url, anything).await.unwrap(), "file");
    let other =
        trusting.fetch(&format!("https://images.test:{port}/"), anything).await.unwrap_err();
    assert_eq!(other, FetchError::Untrusted("images.test".into()));
    assert_eq!(
        fetcher().fetch(&url, anything).await.unwrap_err(),
        FetchError::Untrusted("localhost".into())
    );
}

#[tokio::test]
async fn files_below_a_folder_and_no_others() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("images");
    std::fs::create_dir_all(folder.join("more")).unwrap();
    std::fs::create_dir(place.path().join("images2")).unwrap();
    for name in ["secret", "images/a b", "images/more/c", "images2/d"] {
        std::fs::write(place.path().join(name), name).unwrap();
    }
    std::os::unix::fs::symlink("more/c", folder.join("inside")).unwrap();
    std::os::unix::fs::symlink("../secret", folder.join("outside")).unwrap();
    std::fs::write(folder.join("large"), vec![0; LIMIT + 1]).unwrap();
    let config =
        Config { allowed_local_media_path: Some(folder.clone()), remote_media: false, ..config() };
    let fetcher = fetcher_of(&config, names());
    let read = async |name: &str| {
        fetcher.fetch(&format!("file://{}/{name}", folder.display()), anything).await
    };
    assert_eq!(read("a%20b").await.unwrap(), "images/a b");
    assert_eq!(read("more/c").await.unwrap(), "images/more/c");
    assert_eq!(read("inside").await.unwrap(), "images/more/c");
    for name in [
        "outside",
        "../secret",
        "..%2fsecret",
        "more/../../secret",
        "../images2/d",
        "more",
        "none",
        "",
    ] {
        assert_eq!(read(name).await.unwrap_err(), FetchError::NoSuchFile, "{name}");
    }
    assert_eq!(
        fetcher.fetch("file:///dev/zero", anything).await.unwrap_err(),
        FetchError::NoSuchFile
    );
    assert_eq!(fetcher.fetch("file://host/a", anything).await.unwrap_err(), FetchError::NoSuchFile);
    assert_eq!(read("large").await.unwrap_err(), FetchError::TooLarge(LIMIT));
    assert!(
        Fetcher::new(&Config {
            allowed_local_media_path: Some(place.path().join("none")),
            ..config
        })
        .is_err()
    );
}

/// Nothing is allocated for a declared size, and room is reserved before received bytes are stored.
#[tokio::test]
async fn room_is_asked_for_as_a_file_grows() {
    let (sender, mut closed) = tokio::sync::mpsc::unbounded_channel();
    let port = serve(move |mut stream, _| {
        let sender = sender.clone();
        async move {
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {LIMIT}\r\n\r\n");
            say(&mut stream, &head).await;
            say(&mut stream, &"a".repeat(70_000)).await;
            // The client reads no more data, so wait until it closes the connection.
            while stream.read_u8().await.is_ok() {}
            sender.send(()).unwrap();
        }
    })
    .await;
    let mut asked = Vec::new();
    let room = |bytes| {
        asked.push(bytes);
        bytes < LIMIT
    };
    let refused = fetcher().fetch(&format!("http://images.test:{port}/"), room).await;
    assert_eq!(refused.unwrap_err(), FetchError::NoRoom);
    assert_eq!(asked, [64 << 10, LIMIT], "room is doubled, up to the declared size");
    closed.recv().await.expect("the connection ends with the fetch");

    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("file"), vec![7; 5000]).unwrap();
    let config = Config { allowed_local_media_path: Some(place.path().to_owned()), ..config() };
    let url = format!("file://{}/file", place.path().display());
    let fetcher = fetcher_of(&config, names());
    assert_eq!(fetcher.fetch(&url, |bytes| bytes < 5000).await.unwrap_err(), FetchError::NoRoom);
    assert_eq!(fetcher.fetch(&url, |bytes| bytes == 5000).await.unwrap().len(), 5000);
}

#[tokio::test]
async fn a_dropped_fetch_closes_its_connection() {
    let (sender, mut closed) = tokio::sync::mpsc::unbounded_channel();
    let port = serve(move |mut stream, _| {
        let sender = sender.clone();
        async move {
            say(&mut stream, "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n").await;
            assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
            sender.send(()).unwrap();
        }
    })
    .await;
    let url = format!("http://images.test:{port}/");
    let waited =
        tokio::time::timeout(Duration::from_millis(50), fetcher().fetch(&url, anything)).await;
    assert!(waited.is_err());
    closed.recv().await.unwrap();
}
