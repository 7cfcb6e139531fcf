//! Backends whose models and adapters differ.

use crate::fake::Fake;
use crate::http::{get, post};
use crate::{Rig, eventually};

const CHAT: &str = "/v1/completions";

fn names(rig: &Rig) -> Vec<String> {
    let list = get(rig.address, "/v1/models").json();
    let data = list["data"].as_array().unwrap().clone();
    data.iter().map(|card| card["id"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_request_goes_where_its_name_is_known() {
    let (one, other) = (Fake::other(), Fake::other());
    one.lists(&[("base", None), ("tone", Some("1"))]);
    other.lists(&[("base", None), ("style", Some("2"))]);
    let rig = Rig::new(&[&one, &other]);
    eventually("both backends are up", || get(rig.address, "/health").json()["backends"] == 2);
    assert_eq!(names(&rig), ["base", "tone", "style"]);
    for _ in 0..4 {
        for model in ["tone", "base:tone", "style"] {
            let body = format!("{{\"model\": \"{model}\"}}");
            assert_eq!(post(rig.address, CHAT, &body).status(), 200);
        }
        let body = r#"{"text": "a", "lora_path": "style"}"#;
        assert_eq!(post(rig.address, "/generate", body).status(), 200);
    }
    let of = |backend: &Fake, name: &str| {
        backend.seen().iter().filter(|message| message.text().contains(name)).count()
    };
    assert_eq!([of(&one, "tone"), of(&one, "style")], [8, 0]);
    assert_eq!([of(&other, "tone"), of(&other, "style")], [0, 8]);
    // Names that all backends list, or that none lists, go to all backends.
    for model in ["base", "nobody"] {
        let body = format!("{{\"model\": \"{model}\"}}");
        (0..4).for_each(|_| assert_eq!(post(rig.address, CHAT, &body).status(), 200));
        let body = format!("\"{model}\"}}");
        assert_eq!([of(&one, &body), of(&other, &body)], [2, 2], "{model}");
    }
    // When the only backend with an adapter is down, requests for the adapter do not go to a
    // backend without it.
    one.die();
    eventually("the dead backend is down", || get(rig.address, "/health").json()["backends"] == 1);
    assert_eq!(post(rig.address, CHAT, "{\"model\": \"tone\"}").status(), 503);
    assert_eq!(names(&rig), ["base", "style"]);
}

#[test]
fn a_name_that_was_just_loaded_is_found_by_the_next_request() {
    let (one, other) = (Fake::other(), Fake::other());
    one.lists(&[("base", None)]);
    other.lists(&[("base", None)]);
    let rig = Rig::with(&[&one, &other], |config| {
        config.health.interval = std::time::Duration::from_secs(3600);
    });
    eventually("both backends are up", || get(rig.address, "/health").json()["backends"] == 2);
    other.lists(&[("base", None), ("tone", Some("1"))]);
    for _ in 0..4 {
        assert_eq!(post(rig.address, CHAT, "{\"model\": \"tone\"}").status(), 200);
    }
    assert_eq!((one.seen().len(), other.seen().len()), (0, 4));
}

#[test]
fn one_name_with_two_contents_is_told() {
    let (one, other) = (Fake::other(), Fake::other());
    one.lists(&[("base", None), ("tone", Some("1"))]);
    other.lists(&[("base", None), ("tone", Some("2"))]);
    let rig = Rig::new(&[&one, &other]);
    let warning = || get(rig.address, "/health").json()["warning"].as_str().map(str::to_owned);
    let told = format!("tone is another adapter at {} than at {}", other.url(), one.url());
    eventually("the warning is shown", || warning().as_deref() == Some(&told));
    other.lists(&[("base", None), ("tone", Some("1"))]);
    eventually("the warning is gone", || warning().is_none());
}
