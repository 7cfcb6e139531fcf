//! Why a file was not fetched.

use std::time::Duration;

/// Why a file was not fetched. Each is a clause that reads well behind the name of a part of a
/// request: `messages[0].content[1]: ...`.
///
/// No sentence has an address, or anything of an answer but its status: the network that a server
/// is in is nobody's business.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// Fetching is turned off.
    #[error("this server fetches no URLs: send the file in a data URL")]
    Off,
    /// No URL, or one longer than any server takes.
    #[error("this is no URL")]
    BadUrl,
    /// Something other than the web.
    #[error("URLs of the scheme {0:?} are not fetched: http and https are")]
    Scheme(String),
    /// A name or a password before the host.
    #[error("a URL with a user name or a password is not fetched")]
    Credentials,
    /// Not on the list of domains.
    #[error("{0} is none of the domains that this server fetches from")]
    Domain(String),
    /// Something other than the web's ports.
    #[error("port {0} is not asked: 80 and 443 are")]
    Port(u16),
    /// The name has no address.
    #[error("{0} has no address")]
    NoAddress(String),
    /// One of its addresses is not public.
    #[error("{0} is not a public address")]
    NotPublic(String),
    /// No connection, or none that is trusted.
    #[error("{0} can't be reached")]
    Unreachable(String),
    /// The certificate is not of that host, or nobody vouches for it.
    #[error("the certificate of {0} is not trusted")]
    Untrusted(String),
    /// One redirect too many.
    #[error("more than {0} redirects")]
    Redirects(usize),
    /// A redirect to nowhere.
    #[error("{0} redirects without saying where to")]
    BadRedirect(String),
    /// No file.
    #[error("{host} answered with status {status}")]
    Status {
        /// The host that answered.
        host: String,
        /// HTTP's status.
        status: u16,
    },
    /// A file that is compressed once more.
    #[error("{0} answered with a content encoding, which is not undone")]
    Encoded(String),
    /// The file is longer than it may be.
    #[error("the file has more than {0} bytes, which are the limit")]
    TooLarge(usize),
    /// The connection ended before the file, or the answer is not HTTP.
    #[error("the answer of {0} broke off")]
    Broken(String),
    /// The fetch took too long.
    #[error("the file did not come within {0:?}")]
    TooSlow(Duration),
    /// `file:` URLs are not read.
    #[error("this server reads no files of its own: send the file in a data URL")]
    NoLocalFiles,
    /// Outside of the folder, no file, or not readable: which of them is nobody's business.
    #[error("there is no such file in the folder that this server reads files from")]
    NoSuchFile,
}
