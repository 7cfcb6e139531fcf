//! The forms of a model name.

use std::path::PathBuf;

use crate::embedded;
use crate::error::HubError;
use crate::settings::expand_home;

/// A model name on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelName {
    /// The default model.
    Embedded,
    /// A file or directory on this machine.
    Path(PathBuf),
    /// A model on the hub.
    Hub(HubName),
}

/// A model on the hub: `org/name`, `org/name@revision`, `org/name:QUANT` or `org/name/file.gguf`.
/// The URL of a model's page or of one of its files is also accepted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HubName {
    /// `org/name`.
    pub repository: String,
    /// A branch, tag or commit; `None` means `main`.
    pub revision: Option<String>,
    /// The path of a GGUF file in the repository; `None` if no file was named.
    pub file: Option<String>,
    /// A word in a GGUF file's name, such as `Q4_K_M`; `None` if no word was given.
    pub quant: Option<String>,
}

impl ModelName {
    /// Parses `text`. `revision` overrides a revision in the text.
    ///
    /// # Errors
    /// [`HubError::Name`] if the text is neither a path nor a name of the hub's form.
    pub fn parse(text: &str, revision: Option<&str>) -> Result<Self, HubError> {
        if text == embedded::NAME {
            return Ok(Self::Embedded);
        }
        let text = text.trim();
        let path = expand_home(text);
        if path.exists() || text.starts_with(['.', '/', '~']) {
            return Ok(Self::Path(path));
        }
        let named =
            HubName::parse(text, revision).ok_or_else(|| HubError::Name(text.to_owned()))?;
        Ok(Self::Hub(named))
    }
}

impl HubName {
    /// Parses `text`. `revision` overrides a revision in the text. Returns `None` if the text does
    /// not have the form of a hub name.
    #[must_use]
    pub fn parse(text: &str, revision: Option<&str>) -> Option<Self> {
        match page(text) {
            Some(page) => Self::parse_name(&of_page(page)?, revision),
            None => Self::parse_name(text.trim_end_matches('/'), revision),
        }
    }

    fn parse_name(text: &str, revision: Option<&str>) -> Option<Self> {
        let slash = text.find('/')?;
        let end = text[slash + 1..].find(['@', ':', '/']).map_or(text.len(), |at| slash + 1 + at);
        let (repository, mut rest) = text.split_at(end);
        if ![&repository[..slash], &repository[slash + 1..]].into_iter().all(is_part) {
            return None;
        }
        let mut found = Self { repository: repository.to_owned(), ..Self::default() };
        if let Some(after) = rest.strip_prefix('@') {
            // A revision may contain slashes, so the text after it is a file only if it ends in
            // `.gguf`.
            let colon = after.find(':').unwrap_or(after.len());
            let (mut revision, tail) = after.split_at(colon);
            rest = tail;
            if revision.ends_with(".gguf") && tail.is_empty() {
                let at = revision.find('/').filter(|at| at + 6 < revision.len())?;
                (revision, rest) = revision.split_at(at);
            }
            if revision.is_empty() || revision.contains('@') {
                return None;
            }
            found.revision = Some(revision.to_owned());
        }
        if let Some(quant) = rest.strip_prefix(':') {
            let fits = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
            if quant.is_empty() || !quant.chars().all(fits) {
                return None;
            }
            found.quant = Some(quant.to_owned());
        } else if let Some(file) = rest.strip_prefix('/') {
            if file.len() <= ".gguf".len() || !file.ends_with(".gguf") || file.contains([':', '@'])
            {
                return None;
            }
            found.file = Some(file.to_owned());
        }
        if let Some(revision) = revision {
            found.revision = Some(revision.to_owned());
        }
        Some(found)
    }

    /// Returns the revision, or the hub's default revision.
    #[must_use]
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// Returns the repository, with the revision if one was named, for messages.
    pub(crate) fn what(&self) -> String {
        match &self.revision {
            None => self.repository.clone(),
            Some(revision) => format!("{}@{revision}", self.repository),
        }
    }
}

/// Returns the path of a hub page if `text` is its URL.
fn page(text: &str) -> Option<&str> {
    if let Some(path) = text.strip_prefix("hf://") {
        return Some(path);
    }
    let schemes = ["https://", "http://"];
    let address = schemes.iter().find_map(|scheme| text.strip_prefix(scheme)).unwrap_or(text);
    let address = address.strip_prefix("www.").unwrap_or(address);
    let (host, path) = address.split_once('/')?;
    let hub = host.eq_ignore_ascii_case("huggingface.co") || host.eq_ignore_ascii_case("hf.co");
    // A URL with another host is a page of a mirror: only its path is used, because the mirror is
    // set in HF_ENDPOINT.
    (hub || address.len() < text.len()).then_some(path)
}

/// Returns the model name for the hub page at `path`.
fn of_page(path: &str) -> Option<String> {
    const KINDS: [&str; 5] = ["tree", "blob", "resolve", "raw", "commit"];
    let path = path.split(['?', '#']).next().unwrap_or_default();
    let path = path.trim_matches('/').replace("%2F", "/").replace("%2f", "/");
    let mut parts = path.splitn(4, '/');
    let (owner, name) = (parts.next()?, parts.next()?);
    let (kind, rest) = (parts.next(), parts.next().unwrap_or_default());
    let Some(kind) = kind else { return Some(format!("{owner}/{name}")) };
    if !KINDS.contains(&kind) {
        // The name may continue with a file, as in `org/name/file.gguf`.
        return Some(path);
    }
    // The revision of a pull request contains slashes.
    let pulled = rest.strip_prefix("refs/pr/").map(|rest| rest.find('/').unwrap_or(rest.len()));
    let end = pulled.map_or_else(|| rest.find('/'), |end| Some("refs/pr/".len() + end));
    let (revision, file) = rest.split_at(end.unwrap_or(rest.len()));
    let revision = match revision {
        "" => return None,
        "main" => String::new(),
        revision => format!("@{revision}"),
    };
    // The page of a file that is not GGUF refers to the whole model.
    let file = if file.ends_with(".gguf") { file } else { "" };
    Some(format!("{owner}/{name}{revision}{file}"))
}

/// True if `text` may be the name of an owner or a repository.
fn is_part(text: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(fits)
        && text.len() <= 96
        && !text.contains("--")
        && !text.contains("..")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(repository: &str) -> HubName {
        HubName { repository: repository.to_owned(), ..HubName::default() }
    }

    fn parse(text: &str) -> Option<HubName> {
        HubName::parse(text, None)
    }

    #[test]
    fn names_of_the_hub() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(parse("a/b"), Some(named("a/b")));
        assert_eq!(
            parse("a/b@refs/pr/1"),
            Some(HubName { revision: some("refs/pr/1"), ..named("a/b") })
        );
        assert_eq!(
            HubName::parse("a/b@v1", Some("v2")),
            Some(HubName { revision: some("v2"), ..named("a/b") })
        );
        assert_eq!(parse("a/b:Q4_K_M"), Some(HubName { quant: some("Q4_K_M"), ..named("a/b") }));
        assert_eq!(
            parse("a/b@v1:Q4_K_M"),
            Some(HubName { revision: some("v1"), quant: some("Q4_K_M"), ..named("a/b") })
        );
        assert_eq!(
            parse("a/b.GGUF/sub/c-Q4.gguf"),
            Some(HubName { file: some("sub/c-Q4.gguf"), ..named("a/b.GGUF") })
        );
        assert_eq!(
            parse("a/b@v1/sub/c.gguf"),
            Some(HubName { revision: some("v1"), file: some("sub/c.gguf"), ..named("a/b") })
        );
    }

    #[test]
    fn addresses_of_pages_are_names() {
        for (text, name) in [
            ("https://huggingface.co/a/b", "a/b"),
            ("https://huggingface.co/a/b/", "a/b"),
            ("http://www.huggingface.co/a/b?library=transformers", "a/b"),
            ("https://huggingface.co/a/b#usage", "a/b"),
            ("huggingface.co/a/b", "a/b"),
            ("HF.co/a/b:Q4_K_M", "a/b:Q4_K_M"),
            ("hf://a/b", "a/b"),
            ("hf://a/b@v1", "a/b@v1"),
            ("a/b/", "a/b"),
            ("https://hf.co/a/b/tree/main", "a/b"),
            ("https://hf.co/a/b/tree/v1.0/", "a/b@v1.0"),
            ("https://hf.co/a/b/blob/main/c-Q4.gguf", "a/b/c-Q4.gguf"),
            ("https://hf.co/a/b/resolve/main/sub/c.gguf?download=true", "a/b/sub/c.gguf"),
            ("https://hf.co/a/b/resolve/v1/sub/c.gguf", "a/b@v1/sub/c.gguf"),
            ("https://hf.co/a/b/blob/main/config.json", "a/b"),
            ("https://hf.co/a/b/tree/refs%2Fpr%2F7", "a/b@refs/pr/7"),
            ("https://hf.co/a/b/blob/refs/pr/7/c.gguf", "a/b@refs/pr/7/c.gguf"),
            ("https://mirror.test:8443/a/b/tree/main", "a/b"),
        ] {
            assert_eq!(parse(text), parse(name), "{text}");
            assert!(parse(text).is_some(), "{text}");
        }
        for text in [
            "https://huggingface.co",
            "https://hf.co/a",
            "hf.co/a/b/tree",
            "hf://",
            "hf.co/a/b/discussions/1",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
        let quoted = ModelName::parse(" https://hf.co/a/b \n", None).expect("a name");
        assert_eq!(quoted, ModelName::Hub(named("a/b")));
    }

    #[test]
    fn what_is_no_name_of_the_hub() {
        for text in [
            "a",
            "a/b/c",
            "a/b:",
            "a/b@",
            "/a/b",
            "a b/c",
            "",
            "a/",
            "a/..",
            "../b",
            "a/b@x@y",
            "a/b:q:r",
            "a/b/.gguf",
            "a/b--c",
            "a/b:q/x.gguf",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
