//! Flags about the hosts, web pages and API keys that may use the server.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use forebay_server::{Access, Keys, Tls, TrustedProxies};

/// Host names that always mean this machine.
const LOCAL_HOSTS: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

#[derive(Debug, Args)]
#[command(next_help_heading = "Access")]
pub(crate) struct AccessFlags {
    /// API key that clients send as `Authorization: Bearer KEY` or `X-Api-Key: KEY`; may be
    /// repeated. Prefer a file or the environment, because other users of the machine can see
    /// command lines.
    #[arg(long, value_name = "KEY", env = "FOREBAY_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Vec<String>,
    /// File with API keys, one per line.
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Key for administrative routes: draining, flushing, /server_info, /v1/loads. Without an admin
    /// key, any API key suffices.
    #[arg(long, value_name = "KEY", env = "FOREBAY_ADMIN_API_KEY", hide_env_values = true)]
    pub(crate) admin_api_key: Vec<String>,
    /// File with admin keys, one per line.
    #[arg(long, value_name = "FILE")]
    pub(crate) admin_api_key_file: Option<PathBuf>,
    /// Host names that requests may use, comma-separated. `*.example.com` matches subdomains, `*`
    /// any name. [default: any; for a server without API keys on a loopback address, only that
    /// address and localhost, which prevents DNS rebinding]
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    pub(crate) allowed_hosts: Vec<String>,
    /// Origins of web pages that may send requests, such as `https://chat.example.com`,
    /// comma-separated. `*` means any [default: none].
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',')]
    pub(crate) allowed_origins: Vec<String>,
    /// Path prefix that a proxy adds, such as /llm. Requests may omit it.
    #[arg(long, value_name = "PATH", default_value = "", hide_default_value = true, value_parser = root_path)]
    pub(crate) root_path: String,
    /// Proxies whose X-Forwarded-For header is trusted: addresses, networks (10.0.0.0/8), and
    /// `unix` for clients of a Unix socket; comma-separated.
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true)]
    pub(crate) trusted_proxies: TrustedProxies,
    /// Certificate with its chain, as PEM. Turns on encryption (TLS).
    #[arg(long, value_name = "FILE", requires = "ssl_keyfile")]
    pub(crate) ssl_certfile: Option<PathBuf>,
    /// Private key of the certificate, as unencrypted PEM.
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    pub(crate) ssl_keyfile: Option<PathBuf>,
}

impl AccessFlags {
    /// The API keys, for requests to the model.
    pub(crate) fn keys(&self) -> Result<Keys> {
        keys("--api-key", &self.api_key, self.api_key_file.as_deref()).map(Keys::new)
    }

    /// The admin keys, for all other routes.
    pub(crate) fn admin_keys(&self) -> Result<Keys> {
        keys("--admin-api-key", &self.admin_api_key, self.admin_api_key_file.as_deref())
            .map(Keys::new)
    }

    /// Returns a warning if all clients may use the administrative routes.
    pub(crate) fn shared_administration(keys: &Keys, admin_keys: &Keys) -> Option<&'static str> {
        (keys.len() > 1 && admin_keys.is_empty()).then_some(
            "without --admin-api-key each of the API keys can drain and flush the server, and read \
             /server_info, /v1/loads and /v1/live",
        )
    }

    /// The access rules of a server. `loopback` is the server's address; `None` if other machines
    /// can reach the server.
    pub(crate) fn access(&self, loopback: Option<&str>, keys: &Keys) -> Access {
        access(&self.allowed_hosts, &self.allowed_origins, loopback.filter(|_| keys.is_empty()))
    }

    /// The certificate; `None`: no certificate was given.
    pub(crate) fn tls(&self) -> Result<Option<Tls>> {
        let (Some(certificate), Some(key)) = (&self.ssl_certfile, &self.ssl_keyfile) else {
            return Ok(None);
        };
        match Tls::from_files(certificate, key) {
            Ok(tls) => Ok(Some(tls)),
            Err(reason) => bail!("{reason}"),
        }
    }
}

/// The access rules for hosts and pages. `local` is the address of a server without keys that only
/// this machine can reach. Such a server has to be protected from web pages.
pub(crate) fn access(hosts: &[String], origins: &[String], local: Option<&str>) -> Access {
    let allowed_hosts = match (hosts, local) {
        ([], None) => None,
        ([], Some(bound)) => {
            Some(LOCAL_HOSTS.into_iter().chain([bound]).map(str::to_owned).collect())
        }
        (given, _) => Some(given.to_vec()),
    };
    Access {
        allowed_hosts,
        allowed_origins: origins.to_vec(),
        refuse_other_origins: local.is_some(),
    }
}

/// The keys given by a flag, its environment variable or its file.
pub(crate) fn keys(flag: &str, given: &[String], file: Option<&Path>) -> Result<Vec<String>> {
    let mut all = given.to_vec();
    if let Some(file) = file {
        let text =
            fs::read_to_string(file).with_context(|| format!("{flag}-file {}", file.display()))?;
        let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        if lines.is_empty() {
            bail!("{flag}-file {}: it has no key", file.display());
        }
        all.extend(lines.into_iter().map(str::to_owned));
    }
    // With a key that can't be sent in a header, no client could get in; with an empty key, every
    // client could.
    if all.iter().any(|key| key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic())) {
        bail!(
            "{flag}: a key is made of at least one letter, digit or sign of ASCII, without spaces"
        );
    }
    Ok(all)
}

/// Returns the names of those flags in `arguments` whose values are secret keys.
pub(crate) fn visible_keys(arguments: impl IntoIterator<Item = String>) -> Vec<&'static str> {
    let given: Vec<String> = arguments.into_iter().collect();
    let is = |flag: &str| {
        given.iter().any(|argument| argument.split('=').next().is_some_and(|name| name == flag))
    };
    ["--api-key", "--admin-api-key", "--registration-key", "--router-key"]
        .into_iter()
        .filter(|flag| is(flag))
        .collect()
}

fn root_path(text: &str) -> Result<String, String> {
    let path = text.trim_end_matches('/');
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
    let rooted = path.is_empty() || path.starts_with('/');
    if !rooted || !path.bytes().all(plain) {
        return Err("expected a path such as /llm".into());
    }
    Ok(path.to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    #[command(args_override_self = true)]
    struct Only {
        #[command(flatten)]
        flags: AccessFlags,
    }

    fn flags(arguments: &[&str]) -> AccessFlags {
        Only::try_parse_from([&["serve"], arguments].concat()).unwrap().flags
    }

    #[test]
    fn keys_add_up() {
        let several = flags(&["--api-key", "a", "--api-key", "b"]);
        assert_eq!(format!("{:?}", several.keys().unwrap()), "2 keys");
        assert!(several.admin_keys().unwrap().is_empty());
        for wrong in ["", "two words", "schlüssel"] {
            assert!(flags(&["--api-key", wrong]).keys().is_err(), "{wrong}");
        }
        assert!(flags(&["--api-key-file", "/dev/null"]).keys().is_err());
    }

    #[test]
    fn several_keys_without_an_administrator_are_warned_of() {
        let warned = |keys: &[&str], admin: &[&str]| {
            let [keys, admin] = [keys, admin].map(|all| Keys::new(all.iter().copied()));
            AccessFlags::shared_administration(&keys, &admin).is_some()
        };
        assert!(warned(&["a", "b"], &[]));
        assert!(!warned(&["a", "b"], &["c"]), "a warning despite an admin key");
        assert!(
            !warned(&["a"], &[]) && !warned(&[], &[]),
            "a warning although there is one client"
        );
    }

    #[test]
    fn keys_in_the_process_list_are_noticed() {
        let visible = |list: &[&str]| visible_keys(list.iter().map(|&item| item.to_owned()));
        assert_eq!(visible(&["serve", "--api-key", "x"]), ["--api-key"]);
        assert_eq!(visible(&["--admin-api-key=x", "--api-key-file=y"]), ["--admin-api-key"]);
    }

    #[test]
    fn who_has_no_key_is_guarded_by_its_address() {
        let none = Keys::default();
        let plain = flags(&[]).access(Some("127.0.0.2"), &none);
        let hosts = plain.allowed_hosts.unwrap();
        assert_eq!(hosts, ["localhost", "127.0.0.1", "::1", "127.0.0.2"]);
        assert!(plain.refuse_other_origins);
        for (loopback, keys) in [(None, none.clone()), (Some("::1"), Keys::new(["a"]))] {
            let open = flags(&[]).access(loopback, &keys);
            assert!(open.allowed_hosts.is_none() && !open.refuse_other_origins);
        }
        let given = flags(&["--allowed-hosts", "a,b"]).access(None, &none);
        assert_eq!(given.allowed_hosts.unwrap(), ["a", "b"]);
    }

    #[test]
    fn a_root_is_a_path() {
        assert_eq!(flags(&["--root-path", "/llm/"]).root_path, "/llm");
        assert_eq!(flags(&["--root-path", "/"]).root_path, "");
        assert!(Only::try_parse_from(["serve", "--root-path", "llm"]).is_err());
        assert!(Only::try_parse_from(["serve", "--ssl-certfile", "x"]).is_err());
    }
}
