//! Tests of long texts that are encoded in pieces, cancelled, or rejected.

use super::*;

#[test]
fn long_inputs_in_pieces_have_the_ids_of_the_whole() {
    for cache_bytes in [0, 1 << 20] {
        let pool = TextPool::with_config(
            tokenizer(),
            None,
            &TextConfig { text_cache_bytes: cache_bytes, ..config(3, 100) },
        );
        let texts: Vec<String> = (0..20).map(|seed| prose(seed * 3000, seed)).collect();
        let plain: Vec<_> =
            texts.iter().map(|text| pool.tokenizer().encode(text, true).expect("ids")).collect();
        for _ in 0..2 {
            assert_eq!(
                block_on(pool.within(None).encode_all(texts.clone(), true)).as_ref(),
                Ok(&plain)
            );
        }
        let stats = pool.stats();
        assert_eq!(stats.cut, if cache_bytes == 0 { 2 } else { stats.cut });
        assert_eq!(stats.cache_hits > 0, cache_bytes > 0);
    }
}

#[test]
fn a_text_that_cannot_fit_is_not_encoded() {
    for mode in [TextMode::Auto, TextMode::Inline] {
        let pool = TextPool::with_config(
            tokenizer(),
            None,
            &TextConfig { tokenizer_mode: mode, ..config(1, 4) },
        );
        let long = "a".repeat(5 << 20);
        let refused = |result: Result<(), TextError>, at: usize| {
            assert!(
                matches!(result, Err(TextError::TooLong { text, at_least, limit: 64 }) if text == at && at_least > 64),
                "{result:?}"
            );
        };
        let within = pool.within(64);
        refused(block_on(within.clone().encode(text(&long))).map(drop), 0);
        refused(
            block_on(within.clone().encode_all(vec!["a".into(), long.clone()], true)).map(drop),
            1,
        );
        let pairs = vec![("a".into(), "b".to_owned()), ("a".into(), long)];
        refused(block_on(within.encode_pairs(pairs)).map(drop), 1);
        assert_eq!(pool.stats().encoded_bytes, 0);
    }
}

#[test]
fn a_rendered_chat_that_cannot_fit_is_not_encoded() {
    let template = ChatTemplate::new("{{ messages[0].content }}", None, None, &BTreeMap::new());
    let template = Some(Arc::new(template.expect("a template")));
    let pool = TextPool::with_config(tokenizer(), template, &config(1, 4));
    let chat = TextInput::Chat {
        messages: serde_json::json!([{"role": "user", "content": "a".repeat(1 << 20)}]),
        tools: None,
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: Map::new(),
    };
    let refused = block_on(pool.within(64).encode(chat));
    assert!(matches!(refused, Err(TextError::TooLong { text: 0, .. })), "{refused:?}");
    assert_eq!(pool.stats().encoded_bytes, 0);
}

#[test]
fn encoding_ends_when_there_are_too_many_ids() {
    for cache_bytes in [0, 1 << 20] {
        let pool = TextPool::with_config(
            tokenizer(),
            None,
            &TextConfig { text_cache_bytes: cache_bytes, ..config(1, 4) },
        );
        let long = prose(400_000, 1);
        let ids = pool.tokenizer().encode(&long, false).expect("ids").len();
        // The byte count alone does not reveal that the text is too long.
        let most = pool.tokenizer().fewest_ids(&long);
        assert!(most < ids * 3 / 4, "{most} {ids}");
        let refused = block_on(pool.within(most).encode(text(&long)));
        assert!(matches!(refused, Err(TextError::TooLong { .. })), "{refused:?}");
        assert!(pool.stats().encoded_bytes < 320_000, "{:?}", pool.stats());
        let encoded = block_on(pool.within(ids).encode(text(&long)));
        assert_eq!(encoded.map(|encoded| encoded.ids.len()), Ok(ids));
    }
}

/// Returns a text of two alternating words that has no position for a cut.
fn uncut(bytes: usize) -> String {
    "internationalization\u{2e3a}".repeat(bytes / 23)
}

#[test]
fn a_long_part_is_cancelled_between_words_and_ends_when_it_has_too_many_ids() {
    let encoder = Encoder::new(tokenizer(), 0);
    let long = uncut(100_000);
    let texts = |most| Texts { texts: vec![long.clone()], most, ..Texts::default() };
    let work = encoder.plan(texts(None)).expect("a plan");
    assert_eq!((work.pieces(), work.is_long(0)), (1, true));
    let asked = std::cell::Cell::new(0);
    let go_on = || asked.replace(asked.get() + 1) < 10;
    assert_eq!(encoder.encode_piece(&work, 0, &go_on), Err(TextError::Closed));
    assert_eq!(asked.get(), 11);

    assert_eq!(encoder.encode_piece(&work, 0, &|| true), Ok(()));
    let plain = encoder.tokenizer().encode(&long, false).expect("ids");
    assert_eq!(encoder.finish(&work), Ok(vec![plain.clone()]));

    let most = encoder.tokenizer().fewest_ids(&long);
    let work = encoder.plan(texts(Some(most))).expect("a plan");
    asked.set(0);
    let count = || {
        asked.set(asked.get() + 1);
        true
    };
    let refused = encoder.encode_piece(&work, 0, &count);
    assert!(matches!(refused, Err(TextError::TooLong { .. })), "{refused:?}");
    // The text has two words per 23 bytes.
    assert!(asked.get() < long.len() / 23 * 3 / 2, "{} words", asked.get());
}

#[test]
fn long_pieces_are_not_for_the_threads_that_others_wait_for() {
    let tools = tools(Encoder::new(tokenizer(), 0));
    let queue = Queue::new(10, 1, None);
    let start = |text: String| {
        let (reply, answer) = oneshot::channel();
        let input = Input::Texts { texts: vec![text], add_special_tokens: false };
        let job = Job { tokens: input.tokens(), input, terms: Terms::default(), reply, keep: None };
        (cut(job, &tools), answer)
    };
    // Two pieces between cuts, one piece that cannot be cut, then two more between cuts.
    let text = prose(20_000, 1) + " a " + &uncut(70_000) + " a " + &prose(16_000, 2);
    let (long, mut answer) = start(text.clone());
    let (other, _other_answer) = start(prose(20_000, 3));
    queue.push_long(Arc::clone(&long));
    queue.push_long(Arc::clone(&other));
    let mut order = Vec::new();
    for _ in 0..5 {
        let Some(Task::Piece(taken, piece)) = queue.take(true) else { panic!("no piece") };
        order.push((Arc::ptr_eq(&taken, &long), piece));
        taken.encode(piece, &tools);
    }
    assert_eq!(order, [(true, 0), (false, 0), (true, 1), (false, 1), (false, 2)]);
    let Some((taken, piece)) = queue.take_long() else { panic!("no long piece") };
    assert!(Arc::ptr_eq(&taken, &long) && taken.is_long(piece));
    taken.encode(piece, &tools);
    while answer.try_recv().is_err() {
        let Some(Task::Piece(taken, piece)) = queue.take(true) else { panic!("no piece") };
        taken.encode(piece, &tools);
    }
    queue.close();
    assert!(queue.take_long().is_none());
}

#[test]
fn a_long_text_has_the_ids_of_the_whole() {
    let pool = TextPool::with_config(tokenizer(), None, &config(2, 100));
    let text = prose(20_000, 1) + " a " + &uncut(70_000) + " a " + &prose(16_000, 2);
    let plain = pool.tokenizer().encode(&text, true).expect("ids");
    assert_eq!(block_on(pool.within(None).encode_all(vec![text], true)), Ok(vec![plain]));
}
