//! The network interface over which the ranks of a group communicate.

use std::path::Path;

use forebay_outpost::Collectives;

/// The loopback interface, which other machines can't reach.
const LOOPBACK: &str = "lo";
/// The maximum length of an interface name on Linux, in bytes.
const LONGEST: usize = 15;
/// The folder in which Linux has a subfolder for each interface.
const INTERFACES: &str = "/sys/class/net";
/// The variables by which gloo and NCCL choose the interface for collectives.
const SUMS: [&str; 2] = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"];
/// UCX's variable for the network device over which pages are copied. Only groups on several
/// machines set it: a group on one machine uses the loopback interface, but may still copy pages to
/// other machines.
const COPIES: &str = "UCX_NET_DEVICES";

/// Parses the name of an interface from the command line.
///
/// # Errors
/// Linux does not allow such a name.
pub(crate) fn interface(text: &str) -> Result<String, String> {
    let fits = (1..=LONGEST).contains(&text.len()) && text != "." && text != "..";
    let plain = |c: char| c.is_ascii_graphic() && !"/:,=^".contains(c);
    if fits && text.chars().all(plain) {
        return Ok(text.to_owned());
    }
    Err(format!("the name of one network interface has 1 to {LONGEST} characters, such as eth0"))
}

/// Checks that this machine has the interface. Passes if the system does not list its interfaces.
///
/// # Errors
/// The machine has only other interfaces, which the message lists.
pub(crate) fn check(interface: &str) -> Result<(), String> {
    missing(interface, Path::new(INTERFACES))
}

fn missing(interface: &str, folder: &Path) -> Result<(), String> {
    let Ok(entries) = folder.read_dir() else { return Ok(()) };
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.collect();
    if names.iter().any(|name| name == interface) {
        return Ok(());
    }
    names.sort();
    Err(format!(
        "no network interface {interface} is here (but {}): --collective-interface of `forebay \
         worker` names this machine's",
        names.join(", ")
    ))
}

/// The environment variables that set the network interface of a hand's group. `own`, this
/// machine's setting if any, overrides the brain's. Variables for which `is_set` is true were set
/// by the user and are left out.
pub(crate) fn environment(
    collectives: &Collectives,
    own: Option<&str>,
    is_set: impl Fn(&str) -> bool,
) -> Vec<(&'static str, String)> {
    let interface = match collectives {
        Collectives::None => return Vec::new(),
        Collectives::Machine => LOOPBACK,
        Collectives::Network(named) => own.unwrap_or(named),
    };
    let copies = matches!(collectives, Collectives::Network(_)).then_some(COPIES);
    let names = SUMS.into_iter().chain(copies).filter(|name| !is_set(name));
    names.map(|name| (name, interface.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_linux_takes() {
        for name in ["lo", "eth0", "enp0s31f6", "br-1a2b.3", "a23456789012345"] {
            assert_eq!(interface(name).as_deref(), Ok(name));
        }
        for name in
            ["", ".", "..", "a b", "eth0,eth1", "=eth0", "^lo", "a/b", "a234567890123456", "é"]
        {
            assert!(interface(name).is_err(), "{name}");
        }
    }

    #[test]
    fn interfaces_that_are_not_here_are_said_with_those_that_are() {
        let folder = tempfile::tempdir().expect("a folder");
        ["lo", "eth1"]
            .iter()
            .for_each(|name| std::fs::create_dir(folder.path().join(name)).unwrap());
        assert_eq!(missing("eth1", folder.path()), Ok(()));
        let told = missing("eth0", folder.path()).expect_err("it is not there");
        assert!(told.starts_with("no network interface eth0 is here (but eth1, lo)"), "{told}");
        assert_eq!(missing("eth0", &folder.path().join("none")), Ok(()));
    }

    #[test]
    fn ranks_on_one_machine_stay_on_its_loopback() {
        let none = |_: &str| false;
        let of = |collectives: &Collectives, own| environment(collectives, own, none);
        let lo = |name| (name, "lo".to_owned());
        assert_eq!(of(&Collectives::None, Some("eth1")), []);
        assert_eq!(of(&Collectives::Machine, Some("eth1")), SUMS.map(lo));
    }

    #[test]
    fn ranks_on_several_use_the_interface_of_their_machine() {
        let network = Collectives::Network("eth0".into());
        let all =
            |name: &str| [SUMS[0], SUMS[1], COPIES].map(|variable| (variable, name.to_owned()));
        assert_eq!(environment(&network, None, |_| false), all("eth0"));
        assert_eq!(environment(&network, Some("ib0"), |_| false), all("ib0"));
        let left = environment(&network, None, |name| name != "NCCL_SOCKET_IFNAME");
        assert_eq!(left, [("NCCL_SOCKET_IFNAME", "eth0".into())], "the user's own stay");
    }
}
