//! Compresses the web page's files and lists them for `src/page.rs`.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use xxhash_rust::xxh3::xxh3_64;

/// The folder in which `make web` builds the page.
const DIST: &str = "../../web/dist";

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed={DIST}");
    println!("cargo:rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or_else(|| io::Error::other("no OUT_DIR"))?);
    let mut table = String::from("&[\n");
    let mut paths = vec![PathBuf::from("index.html")];
    for entry in fs::read_dir(Path::new(DIST).join("assets"))? {
        paths.push(Path::new("assets").join(entry?.file_name()));
    }
    paths.sort();
    for (number, path) in paths.iter().enumerate() {
        let content = fs::read(Path::new(DIST).join(path))?;
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(&content)?;
        fs::write(out.join(number.to_string()), &content)?;
        fs::write(out.join(format!("{number}.gz")), encoder.finish()?)?;
        let name = path.to_string_lossy();
        let route = if name == "index.html" { "/".to_owned() } else { format!("/{name}") };
        let media_type = match path.extension().and_then(|extension| extension.to_str()) {
            Some("html") => "text/html; charset=utf-8",
            Some("css") => "text/css; charset=utf-8",
            Some("js") => "text/javascript; charset=utf-8",
            Some("svg") => "image/svg+xml",
            Some("txt") => "text/plain; charset=utf-8",
            _ => return Err(io::Error::other(format!("{name} has no media type"))),
        };
        let hash = xxh3_64(&content);
        // `OUT_DIR` is resolved when the list is compiled, so the build folder may move.
        let bytes =
            |end: &str| format!("include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{number}{end}\"))");
        let (plain, gzip) = (bytes(""), bytes(".gz"));
        writeln!(
            table,
            "File {{ route: {route:?}, media_type: {media_type:?}, hash: {hash}, plain: {plain}, gzip: {gzip} }},"
        )
        .map_err(io::Error::other)?;
    }
    table.push(']');
    fs::write(out.join("files.rs"), table)
}
