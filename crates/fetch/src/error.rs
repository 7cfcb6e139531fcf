//! Reasons for which a file is not fetched.

use std::time::Duration;

/// Why a file was not fetched. Each message follows the location of the URL in the request:
/// `messages[0].content[1]: ...`.
///
/// No message contains an address, or any part of a response except its status. So clients learn
/// nothing about the server's network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// Fetching is turned off.
    #[error("this server fetches no URLs: send the file in a data URL")]
    Off,
    /// The text is not a URL, or is too long.
    #[error("this is no URL")]
    BadUrl,
    /// The scheme is not `http` or `https`.
    #[error("URLs of the scheme {0:?} are not fetched: http and https are")]
    Scheme(String),
    /// The URL contains a user name or a password.
    #[error("a URL with a user name or a password is not fetched")]
    Credentials,
    /// The host is not one of the allowed domains.
    #[error("{0} is not a domain that this server fetches from")]
    Domain(String),
    /// The port is not 80 or 443.
    #[error("port {0} is not asked: 80 and 443 are")]
    Port(u16),
    /// The host's name has no address.
    #[error("{0} has no address")]
    NoAddress(String),
    /// One of the host's addresses is not public.
    #[error("{0} is not a public address")]
    NotPublic(String),
    /// The connection failed.
    #[error("{0} can't be reached")]
    Unreachable(String),
    /// The certificate does not belong to the host, or is not trusted.
    #[error("the certificate of {0} is not trusted")]
    Untrusted(String),
    /// There were too many redirects.
    #[error("more than {0} redirects")]
    Redirects(usize),
    /// A redirect has no valid target.
    #[error("{0} redirects without saying where to")]
    BadRedirect(String),
    /// The response has a status other than 200.
    #[error("{host} answered with status {status}")]
    Status {
        /// The host that sent the response.
        host: String,
        /// The HTTP status.
        status: u16,
    },
    /// The response has a content encoding.
    #[error("{0} answered with a content encoding, which is not undone")]
    Encoded(String),
    /// The file is too large.
    #[error("the file has more than {0} bytes, which are the limit")]
    TooLarge(usize),
    /// The caller has no room for the file.
    #[error("there is no room for the file")]
    NoRoom,
    /// The connection closed before the end of the file, or the response is not HTTP.
    #[error("the answer of {0} broke off")]
    Broken(String),
    /// The fetch took too long.
    #[error("the file did not come within {0:?}")]
    TooSlow(Duration),
    /// `file:` URLs are not allowed.
    #[error("this server reads no files of its own: send the file in a data URL")]
    NoLocalFiles,
    /// The file is outside the folder, missing or not readable. The error does not tell which.
    #[error("there is no such file in the folder that this server reads files from")]
    NoSuchFile,
}
