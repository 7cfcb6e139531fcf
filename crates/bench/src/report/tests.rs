use serde_json::{Value, json};

use super::*;

/// A small result with all data that a page can show.
fn full() -> Value {
    json!({
        "label": "first", "forebay_version": "0.1.0", "model": "smollm2", "backend": "openai-chat",
        "dataset_name": "random", "num_prompts": 3, "request_rate": "inf", "max_concurrency": null,
        "duration": 2.0, "completed": 2, "failed": 1, "total_output_tokens": 8, "output_throughput": 4.0,
        "median_ttft_ms": 20.0, "p99_ttft_ms": 30.0, "client_cpu_seconds": 0.1,
        "server_cpu": [{"pid": 7, "name": "server", "user_seconds": 1.0, "system_seconds": 0.5}],
        "errors": {"refused": 1},
        "timeline": [{"second": 0, "output_tokens": 4, "concurrency": 2, "sent": 3, "finished": 1}],
        "histograms": {"ttft_ms": {"edges": [10, 20, 40], "counts": [1, 1]}},
    })
}

/// The ids of the page's sections, in order.
fn sections(page: &str) -> Vec<&str> {
    page.split("<section id=\"").skip(1).map(|rest| rest.split('"').next().unwrap_or("")).collect()
}

#[test]
fn a_full_run_has_every_section() {
    let page = render("A title", &[Run::new("x", full())]);
    let all = ["care", "settings", "comparison", "distributions", "timelines", "cpu", "errors"];
    assert_eq!(sections(&page), all);
    assert!(page.contains("<title>A title</title>"));
    assert!(!page.contains('×'), "a single run is compared with none");
}

#[test]
fn missing_sections_are_left_out() {
    for key in ["timeline", "histograms", "errors", "server_cpu"] {
        for missing in
            [Value::Null, json!("nonsense"), json!([]), json!({}), json!([null]), json!(5)]
        {
            let mut run = full();
            run[key] = missing;
            let page = render("t", &[Run::new("x", run)]);
            let has = |id| sections(&page).contains(&id);
            assert_eq!(has("timelines"), key != "timeline", "{page}");
            assert_eq!(has("distributions"), key != "histograms");
            assert_eq!(has("errors"), key != "errors");
            assert!(has("cpu"), "the client's is known");
            assert!(!page.contains("NaN") && !page.contains("inf\"") && !page.contains("-inf"));
        }
    }
    let page = render("t", &[Run::new("x", json!({"output_throughput": 1}))]);
    assert_eq!(sections(&page), ["care", "settings", "comparison"]);
}

#[test]
fn every_run_has_its_column_and_its_ratio() {
    let mut faster = full();
    faster["label"] = json!("second");
    faster["output_throughput"] = json!(6.0);
    faster["median_ttft_ms"] = json!(30.0);
    let page = render("t", &[Run::new("x", full()), Run::new("y", faster), Run::new("z", full())]);
    assert!(page.contains("1.50× ▲ better"), "throughput");
    assert!(page.contains("1.50× ▼ worse"), "time to first token");
    assert!(page.contains("1.00× ≈ same"));
    for class in ["c0 d0", "c1 d1", "c2 d2"] {
        assert!(page.contains(&format!("class=\"series {class}\"")), "{class}");
    }
}

#[test]
fn what_comes_from_files_is_text() {
    const EVIL: &str = "</title></style><script>alert('&\"')</script>";
    // Replaces every string and every map key of the file with the same hostile text.
    fn poisoned(value: Value) -> Value {
        match value {
            Value::String(_) => json!(EVIL),
            Value::Array(list) => list.into_iter().map(poisoned).collect(),
            Value::Object(map) => {
                Value::Object(map.into_iter().map(|(key, value)| (key, poisoned(value))).collect())
            }
            value => value,
        }
    }
    let mut run = poisoned(full());
    run["errors"] = json!({EVIL: 1});
    run["goodput_slos"] = json!({EVIL: EVIL});
    let page = render(EVIL, &[Run::new(EVIL, run.clone()), Run::new(EVIL, run)]);
    assert!(!page.contains("<script"), "{page}");
    assert!(page.contains("&lt;script&gt;alert("));
    assert_eq!(page.matches("</style>").count(), 1);
    // An unescaped quote would close an attribute.
    assert!(!page.contains("'&\""));
}

#[test]
fn many_runs_make_a_page() {
    let runs: Vec<Run> = (0..30).map(|number| Run::new(format!("run {number}"), full())).collect();
    let page = render("t", &runs);
    assert!(page.contains("<b>AD</b>"));
}

#[test]
fn the_page_needs_nothing_else() {
    let page = render("t", &[Run::new("x", full())]);
    for outside in
        ["http://", "https://", "src=", "@import", "url(", "<script", "<link rel=\"style"]
    {
        assert!(!page.contains(outside), "{outside}");
    }
}
