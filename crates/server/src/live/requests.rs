//! Finds the requests that changed since a viewer's last update.

use std::collections::{HashMap, HashSet};

use forebay_engine::{EngineHandle, EventKind, MOST_VIEWS, Moment, Phase, RequestView, Since};

use crate::live::shown::Snapshot;
use crate::live::tick::RequestTick;

/// The data about requests that a viewer has already received.
#[derive(Debug, Default)]
pub(super) struct RequestsSent {
    /// The index of the next event to read, per replica.
    places: Vec<u64>,
    /// The requests as they were last sent, with their replicas.
    known: HashMap<u64, (usize, RequestView)>,
    /// Requests that are not in a snapshot yet, known from their events only.
    unseen: HashMap<u64, (usize, RequestView)>,
}

/// A replica's current requests, and its events since the last update.
pub(super) struct News<'a> {
    views: &'a [RequestView],
    moments: Since<Moment>,
}

impl RequestsSent {
    pub(super) fn new(engines: &[EngineHandle]) -> Self {
        let places = engines.iter().map(|engine| engine.moments_since(u64::MAX).next).collect();
        Self { places, ..Self::default() }
    }

    /// Makes all live requests count as changed, so that they are sent again.
    pub(super) fn forget(&mut self) {
        self.known.clear();
    }

    /// Returns the requests that changed, and the ids of those that finished. A request that began
    /// and finished since the last update is in both.
    pub(super) fn changes(&mut self, snapshot: &Snapshot) -> (Vec<RequestTick>, Vec<u64>) {
        let mut news = Vec::with_capacity(snapshot.replicas.len());
        for (at, seen) in snapshot.replicas.iter().enumerate() {
            let Some(place) = self.places.get_mut(at) else { continue };
            let moments = seen.engine.moments_since(*place);
            *place = moments.next;
            news.push(News { views: &seen.views, moments });
        }
        self.take(&news)
    }

    fn take(&mut self, news: &[News<'_>]) -> (Vec<RequestTick>, Vec<u64>) {
        let (mut changed, mut ended) = (Vec::new(), Vec::new());
        for (at, News { views, .. }) in news.iter().enumerate() {
            for &view in *views {
                self.unseen.remove(&view.id);
                if self.known.insert(view.id, (at, view)) != Some((at, view)) {
                    changed.push(shown(at, view));
                }
            }
        }
        for (at, News { moments, .. }) in news.iter().enumerate() {
            for moment in &moments.entries {
                if let EventKind::Finished { .. } = moment.what {
                    if self.known.remove(&moment.id).is_some() {
                        ended.push(moment.id);
                    } else if let Some((at, view)) = self.unseen.remove(&moment.id) {
                        changed.push(shown(at, view));
                        ended.push(moment.id);
                    }
                } else if !self.known.contains_key(&moment.id) {
                    self.note(at, moment);
                }
            }
        }
        if news.iter().any(|news| news.moments.lost > 0) {
            self.drop_absent(news, &mut ended);
        }
        (changed, ended)
    }

    fn note(&mut self, at: usize, moment: &Moment) {
        let view = match moment.what {
            EventKind::Queued { prompt, max_tokens } => {
                let view = RequestView {
                    id: moment.id,
                    phase: Phase::Queued,
                    prompt,
                    cached: 0,
                    computed: 0,
                    generated: 0,
                    max_tokens,
                    arrived_us: moment.at_us,
                    waits_for: None,
                    untouched: true,
                };
                self.unseen.insert(moment.id, (at, view));
                return;
            }
            _ => self.unseen.get_mut(&moment.id),
        };
        let Some((replica, view)) = view else { return };
        *replica = at;
        match moment.what {
            EventKind::Admitted { cached } => {
                (view.cached, view.computed) = (cached, cached);
                view.phase = Phase::Prefill;
            }
            EventKind::Prefill { tokens } => view.computed += tokens,
            EventKind::FirstToken => {
                view.generated = 1;
                view.phase = Phase::Decode;
            }
            EventKind::Tokens { count } => {
                view.generated += count;
                view.computed += count;
            }
            EventKind::Received
            | EventKind::Queued { .. }
            | EventKind::Replayed
            | EventKind::Preempted
            | EventKind::Finished { .. } => {}
        }
    }

    /// Drops requests that are no longer live, and adds their ids to `ended`. Called after events
    /// were lost, since the lost events may include the ends of requests.
    fn drop_absent(&mut self, news: &[News<'_>], ended: &mut Vec<u64>) {
        self.unseen.clear();
        if news.iter().any(|news| news.views.len() >= MOST_VIEWS) {
            return;
        }
        let alive: HashSet<u64> =
            news.iter().flat_map(|news| news.views).map(|view| view.id).collect();
        let absent = self.known.extract_if(|id, _| !alive.contains(id));
        ended.extend(absent.map(|(id, _)| id));
    }
}

fn shown(replica: usize, view: RequestView) -> RequestTick {
    RequestTick {
        id: view.id.to_string(),
        replica,
        state: view.phase,
        prompt: view.prompt,
        cached: view.cached,
        computed: view.computed,
        generated: view.generated,
        max_tokens: view.max_tokens,
        since_us: view.arrived_us,
        waits_for: view.waits_for.map(|id| id.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(id: u64, generated: u32) -> RequestView {
        RequestView {
            id,
            phase: Phase::Decode,
            prompt: 9,
            cached: 0,
            computed: 9 + generated,
            generated,
            max_tokens: 50,
            arrived_us: 5,
            waits_for: None,
            untouched: false,
        }
    }

    fn moments(of: &[(u64, EventKind)], lost: u64) -> Since<Moment> {
        let entries = of.iter().map(|&(id, what)| Moment { id, at_us: 7, what }).collect();
        Since { entries, lost, next: 0 }
    }

    fn ids(changed: &[RequestTick]) -> Vec<&str> {
        changed.iter().map(|request| request.id.as_str()).collect()
    }

    const END: EventKind = EventKind::Finished { reason: "stop" };

    #[test]
    fn what_has_not_changed_is_not_told_again() {
        let mut told = RequestsSent::default();
        let all = [view(1, 1), view(2, 1)];
        let news = |views| [News { views, moments: moments(&[], 0) }];
        assert_eq!(ids(&told.take(&news(&all)).0), ["1", "2"]);
        assert_eq!(told.take(&news(&all)), (vec![], vec![]));
        let later = [view(1, 1), view(2, 2)];
        assert_eq!(ids(&told.take(&news(&later)).0), ["2"]);
        told.forget();
        assert_eq!(ids(&told.take(&news(&all)).0), ["1", "2"]);
    }

    #[test]
    fn one_that_comes_and_goes_between_two_looks_is_told_with_its_counts() {
        let mut told = RequestsSent::default();
        let first = [(3, EventKind::Queued { prompt: 9, max_tokens: 50 })];
        let news = News { views: &[], moments: moments(&first, 0) };
        assert_eq!(told.take(&[news]), (vec![], vec![]));
        let then = [
            (3, EventKind::Admitted { cached: 4 }),
            (3, EventKind::Prefill { tokens: 5 }),
            (3, EventKind::FirstToken),
            (3, EventKind::Tokens { count: 6 }),
            (3, END),
        ];
        let news = News { views: &[], moments: moments(&then, 0) };
        let (changed, ended) = told.take(&[news]);
        assert_eq!(ended, [3]);
        let [RequestTick { cached: 4, computed: 15, generated: 7, prompt: 9, since_us: 7, .. }] =
            changed[..]
        else {
            panic!("{changed:?}")
        };
        assert!(
            told.known.is_empty() && told.unseen.is_empty(),
            "nothing is kept of ended requests"
        );
    }

    #[test]
    fn an_end_is_told_once_and_of_those_alone_that_were_told() {
        let mut told = RequestsSent::default();
        let all = [view(1, 1)];
        let news = News { views: &all, moments: moments(&[(1, END), (9, END)], 0) };
        let (changed, ended) = told.take(&[news]);
        assert_eq!((ids(&changed), ended), (vec!["1"], vec![1]));
        let news = News { views: &[], moments: moments(&[], 0) };
        assert_eq!(told.take(&[news]), (vec![], vec![]));
    }

    #[test]
    fn lost_moments_lose_no_end() {
        let mut told = RequestsSent::default();
        let all = [view(1, 1), view(2, 1)];
        told.take(&[News { views: &all, moments: moments(&[], 0) }]);
        let news = News { views: &all[1..], moments: moments(&[], 5) };
        assert_eq!(told.take(&[news]), (vec![], vec![1]));
    }

    #[test]
    fn a_request_that_moves_to_another_replica_has_not_ended() {
        let mut told = RequestsSent::default();
        let all = [view(1, 1)];
        let quiet = || moments(&[], 0);
        let there = [News { views: &all, moments: quiet() }, News { views: &[], moments: quiet() }];
        told.take(&there);
        let nowhere =
            [News { views: &[], moments: quiet() }, News { views: &[], moments: quiet() }];
        assert_eq!(told.take(&nowhere), (vec![], vec![]));
        let here = [News { views: &[], moments: quiet() }, News { views: &all, moments: quiet() }];
        let (changed, ended) = told.take(&here);
        assert_eq!((changed[0].replica, ended), (1, vec![]));
    }
}
