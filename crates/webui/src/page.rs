//! The files of the web page.

use bytes::Bytes;
use http::header::{
    ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG,
    HeaderName, IF_NONE_MATCH, REFERRER_POLICY, VARY, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, HeaderValue, Response, StatusCode};

/// A file that `build.rs` has compressed.
struct File {
    route: &'static str,
    media_type: &'static str,
    hash: u64,
    plain: &'static [u8],
    gzip: &'static [u8],
}

static FILES: &[File] = include!(concat!(env!("OUT_DIR"), "/files.rs"));

/// The Content-Security-Policy: the page runs only its own scripts, connects only to its own
/// server, and can't be framed.
const POLICY: &str = "default-src 'self'; connect-src 'self'; img-src 'self' data: blob:; style-src 'self'; \
                      script-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

/// Returns the response to a GET of `path` with these headers; `None`: the page has no such file.
/// These files need no key.
#[must_use]
pub fn page(path: &str, headers: &HeaderMap) -> Option<Response<Bytes>> {
    let file = FILES.iter().find(|file| file.route == path)?;
    let packed = accepts_gzip(headers);
    let tag = format!("\"{:016x}{}\"", file.hash, if packed { "-gzip" } else { "" });
    let known = headers.get_all(IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let known = known.flat_map(|value| value.split(',')).map(str::trim);
    let unchanged = known.into_iter().any(|known| known.trim_start_matches("W/") == tag);
    let body = match (unchanged, packed) {
        (true, _) => &[][..],
        (false, true) => file.gzip,
        (false, false) => file.plain,
    };
    let mut response = Response::new(Bytes::from_static(body));
    if unchanged {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    }
    // The names of all other files change with their content.
    let caching = if path == "/" { "no-cache" } else { "public, max-age=31536000, immutable" };
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_TYPE, file.media_type),
        (CACHE_CONTROL, caching),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (VARY, "accept-encoding"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    if packed {
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    headers.insert(ETAG, HeaderValue::from_str(&tag).ok()?);
    Some(response)
}

/// True if the client accepts gzip (RFC 9110, section 12.5.3).
fn accepts_gzip(headers: &HeaderMap) -> bool {
    let values = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let mut any = None;
    for coding in values.flat_map(|value| value.split(',')) {
        let mut parts = coding.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let refused = parts.any(|weight| {
            let weight = weight.to_ascii_lowercase();
            weight.strip_prefix("q=").is_some_and(|q| q.trim().parse() == Ok(0.0_f32))
        });
        if name.eq_ignore_ascii_case("gzip") {
            return !refused;
        }
        if name == "*" {
            any = Some(!refused);
        }
    }
    any.unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;

    use super::*;

    fn asking(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        let pairs = pairs.iter();
        pairs.map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
    }

    #[test]
    fn the_page_and_all_that_it_names_are_there() {
        let html = page("/", &HeaderMap::new()).unwrap();
        assert_eq!(html.headers()[CONTENT_TYPE], "text/html; charset=utf-8");
        let html = String::from_utf8(html.body().to_vec()).unwrap();
        let named: Vec<&str> = html.split('"').filter(|part| part.contains("assets/")).collect();
        assert!(named.len() >= 3, "{named:?}");
        for name in named {
            let file = page(&format!("/{}", name.trim_start_matches('/')), &HeaderMap::new());
            assert!(file.is_some_and(|file| !file.body().is_empty()), "{name}");
        }
        for unknown in ["/assets/", "/assets/../index.html", "/index.html", "//", "/assets/x.js"] {
            assert!(page(unknown, &HeaderMap::new()).is_none(), "{unknown}");
        }
    }

    #[test]
    fn compressed_or_not_the_content_is_the_same() {
        for file in FILES {
            let packed = page(file.route, &asking(&[(ACCEPT_ENCODING, "br, gzip")])).unwrap();
            assert_eq!(packed.headers()[CONTENT_ENCODING], "gzip");
            let mut content = Vec::new();
            GzDecoder::new(&packed.body()[..]).read_to_end(&mut content).unwrap();
            let plain = page(file.route, &HeaderMap::new()).unwrap();
            assert!(plain.headers().get(CONTENT_ENCODING).is_none());
            assert!(content == *plain.body(), "{}", file.route);
            assert_ne!(packed.headers()[ETAG], plain.headers()[ETAG]);
        }
    }

    #[test]
    fn encodings_are_chosen_as_the_client_says() {
        for (value, accepted) in [
            ("gzip", true),
            ("GZIP;q=0.5", true),
            ("gzip;q=0", false),
            ("gzip; q=0.000", false),
            ("*", true),
            ("*;q=0, gzip", true),
            ("gzip;q=0, *", false),
            ("br", false),
            ("", false),
        ] {
            assert_eq!(accepts_gzip(&asking(&[(ACCEPT_ENCODING, value)])), accepted, "{value}");
        }
    }

    #[test]
    fn who_has_the_file_gets_it_no_more() {
        let first = page("/", &HeaderMap::new()).unwrap();
        let tag = first.headers()[ETAG].to_str().unwrap().to_owned();
        for value in [tag.clone(), format!("W/{tag}"), format!("\"other\", {tag}")] {
            let again = page("/", &asking(&[(IF_NONE_MATCH, &value)])).unwrap();
            assert_eq!((again.status(), again.body().len()), (StatusCode::NOT_MODIFIED, 0));
        }
        let packed = asking(&[(IF_NONE_MATCH, &tag), (ACCEPT_ENCODING, "gzip")]);
        assert_eq!(page("/", &packed).unwrap().status(), StatusCode::OK);
    }
}
