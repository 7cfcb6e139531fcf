//! The cost of pages and blocks, with 64 to 4096 prompts of 4096 tokens whose blocks the pool
//! holds. `cargo bench -p forebay-kvcache`.
//!
//! Every operation is O(1) per page, whatever else the pool holds. Only the memory that the
//! operations touch grows with the pool: from some size on each operation costs a CPU cache miss.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};
use forebay_kvcache::{BlockHash, Lease, Namer, PagePool};

const PROMPTS: [u32; 4] = [64, 256, 1024, 4096];
const PAGE_SIZE: u32 = 16;
const PROMPT_TOKENS: u32 = 4096;
const BLOCKS: u32 = PROMPT_TOKENS / PAGE_SIZE;
/// Coprime to every number of prompts, so that successive operations touch distant memory.
const STRIDE: u32 = 37;

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(30)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    names(&mut criterion);
    pages(&mut criterion);
    criterion.final_summary();
}

fn prompt(number: u32) -> Vec<i32> {
    (0..PROMPT_TOKENS).map(|at| (number * PROMPT_TOKENS + at).cast_signed()).collect()
}

fn block_names(prompt: &[i32]) -> Vec<BlockHash> {
    Namer::open().chain(0, prompt, PAGE_SIZE as usize)
}

/// Creates a pool full of unused blocks, and `spare` free pages. Also returns the names of the
/// blocks, by prompt.
fn resident(prompts: u32, spare: u32) -> (PagePool, Vec<Vec<BlockHash>>) {
    let mut pool = PagePool::<forebay_kvcache::Hot>::new(prompts * BLOCKS + spare);
    let names: Vec<_> = (0..prompts).map(|number| block_names(&prompt(number))).collect();
    for prompt in &names {
        let mut leases = allocate(&mut pool, BLOCKS);
        for (lease, &name) in leases.iter().zip(prompt) {
            assert!(pool.name(lease, name), "no two prompts share a block");
        }
        pool.release_all(&mut leases);
    }
    (pool, names)
}

fn allocate(pool: &mut PagePool, pages: u32) -> Vec<Lease> {
    let leases: Vec<_> =
        (0..pages).map_while(|_| pool.allocate()).map(|(lease, _)| lease).collect();
    assert_eq!(leases.len(), pages as usize, "the pool has room");
    leases
}

/// Computes the names of a prompt's blocks. Throughput is in blocks.
fn names(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("names");
    let prompt = prompt(0);
    group.throughput(Throughput::Elements(u64::from(BLOCKS)));
    group.bench_function("prompt", |bencher| bencher.iter(|| block_names(black_box(&prompt))));
    group.finish();
}

/// Allocates, finds and evicts pages. Throughput is in pages.
fn pages(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pages");
    group.throughput(Throughput::Elements(u64::from(BLOCKS)));
    for prompts in PROMPTS {
        let (mut pool, names) = resident(prompts, BLOCKS);
        group.bench_function(BenchmarkId::new("allocate and release, free", prompts), |bencher| {
            bencher.iter(|| {
                let mut leases = allocate(&mut pool, BLOCKS);
                pool.release_all(&mut leases);
            });
        });
        let mut number = 0;
        group.bench_function(BenchmarkId::new("look up and release, found", prompts), |bencher| {
            bencher.iter(|| {
                number = (number + STRIDE) % prompts;
                let found = names[number as usize].iter().map_while(|&name| pool.share(name));
                let mut leases: Vec<_> = found.collect();
                assert_eq!(leases.len(), BLOCKS as usize, "the whole prompt is cached");
                pool.release_all(&mut leases);
            });
        });
        let absent = block_names(&prompt(prompts));
        group.bench_function(BenchmarkId::new("look up, absent", prompts), |bencher| {
            bencher.iter(|| {
                let found = absent.iter().filter(|&&name| pool.share(name).is_some()).count();
                assert_eq!(found, 0, "the prompt is new");
            });
        });
        // Each allocated page held the oldest block, and gets a new block here. So the pool stays
        // full of named blocks.
        let mut held = allocate(&mut pool, BLOCKS);
        let namer = Namer::open();
        let mut parent = namer.root(1);
        group.bench_function(BenchmarkId::new("evict, name and release", prompts), |bencher| {
            bencher.iter(|| {
                let mut leases = allocate(&mut pool, BLOCKS);
                for lease in &leases {
                    parent = namer.child(parent, &[0; PAGE_SIZE as usize]);
                    assert!(pool.name(lease, parent), "the chain of names is new");
                }
                pool.release_all(&mut leases);
            });
        });
        pool.release_all(&mut held);
    }
    group.finish();
}
