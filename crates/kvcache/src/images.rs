//! The pool of image pages, which hold the vision tower's output for images as long as there is
//! room.

use crate::hash::{BlockHash, ImageId};
use crate::pool::{Counts, Lease, PagePool};

/// The tier of image pages, on the device.
#[derive(Debug, PartialEq, Eq)]
pub enum ImageTier {}

/// The right to use all pages of an image. It must be given back.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a lease that is not released leaks its pages"]
pub struct ImageLease(Vec<Lease<ImageTier>>);

impl ImageLease {
    /// The pages, in the order of the image's positions.
    pub fn pages(&self) -> impl ExactSizeIterator<Item = u32> {
        self.0.iter().map(Lease::page)
    }
}

/// The images that image pages hold, and the leases on them. The longest unused image is evicted
/// first.
#[derive(Debug)]
pub struct ImagePool {
    pages: PagePool<ImageTier>,
}

/// Names a page of an image by the image and the page's index. Identities are hashes, so names of
/// different images don't collide.
fn name(ImageId(image): ImageId, page: usize) -> BlockHash {
    const STRIDE: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
    BlockHash::from(image.wrapping_add(STRIDE.wrapping_mul(page as u128)))
}

impl ImagePool {
    /// Creates a pool of `pages` free pages, numbered from 0.
    #[must_use]
    pub fn new(pages: u32) -> Self {
        Self { pages: PagePool::new(pages) }
    }

    /// Leases the `pages` pages of an image. Other owners may lease them too. `None`: no pages hold
    /// the image.
    pub fn find(&mut self, image: ImageId, pages: u32) -> Option<ImageLease> {
        let mut found = Vec::with_capacity(pages as usize);
        for page in 0..pages as usize {
            let Some(lease) = self.pages.share(name(image, page)) else {
                // If some pages of an image were evicted, the rest is of no use.
                self.release(ImageLease(found));
                self.forget(image, pages);
                return None;
            };
            found.push(lease);
        }
        Some(ImageLease(found))
    }

    /// Leases `pages` pages without content. Returns `None` and leases no page if too many pages
    /// are held.
    pub fn allocate(&mut self, pages: u32) -> Option<ImageLease> {
        (self.pages.available() >= pages).then(|| {
            let leases = (0..pages).map_while(|_| self.pages.allocate());
            ImageLease(leases.map(|(lease, _)| lease).collect())
        })
    }

    /// Names the image that the leased pages hold. No other pages may hold it.
    pub fn publish(&mut self, lease: &ImageLease, image: ImageId) {
        for (page, lease) in lease.0.iter().enumerate() {
            let named = self.pages.name(lease, name(image, page));
            debug_assert!(named, "{image:?} is there twice");
        }
    }

    /// Returns another lease of leased pages.
    pub fn join(&mut self, lease: &ImageLease) -> ImageLease {
        ImageLease(lease.0.iter().map(|lease| self.pages.join(lease)).collect())
    }

    /// Gives a lease back, the last page first, so that the last page is evicted first.
    pub fn release(&mut self, mut lease: ImageLease) {
        self.pages.release_all(&mut lease.0);
    }

    /// Forgets an image of `pages` pages, because its content cannot be trusted. A lease of it
    /// stays valid.
    pub fn forget(&mut self, image: ImageId, pages: u32) {
        for page in 0..pages as usize {
            self.pages.forget(name(image, page));
        }
    }

    /// Forgets every image without a lease.
    pub fn flush(&mut self) {
        self.pages.flush();
    }

    /// The number of all pages.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.pages.size()
    }

    /// The number of pages in each state.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.pages.counts()
    }

    /// The number of current leases of a page.
    #[must_use]
    pub fn leases(&self, page: u32) -> u32 {
        self.pages.leases(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ImageId = ImageId(1 << 77);
    const B: ImageId = ImageId(5);

    fn published(pool: &mut ImagePool, image: ImageId, pages: u32) -> ImageLease {
        let lease = pool.allocate(pages).expect("room");
        pool.publish(&lease, image);
        lease
    }

    #[test]
    fn images_are_shared_and_the_longest_unused_goes_first() {
        let mut pool = ImagePool::new(4);
        assert!(pool.find(A, 2).is_none());
        let a = published(&mut pool, A, 2);
        let again = pool.find(A, 2).expect("there");
        assert!(again.pages().eq(a.pages()));
        let b = published(&mut pool, B, 2);
        assert!(pool.allocate(1).is_none(), "all pages are held");
        pool.release(b);
        pool.release(a);
        assert!(pool.allocate(3).is_none(), "A is still leased once");
        pool.release(again);
        let c = pool.allocate(1).expect("room");
        assert!(pool.find(B, 2).is_none(), "B was least recently used, and is evicted whole");
        assert_eq!(pool.counts(), Counts { free: 1, cached: 2, held: 1 });
        let a = pool.find(A, 2).expect("there");
        pool.release(a);
        pool.release(c);
        pool.flush();
        assert_eq!(pool.counts().free, 4);
        assert!(pool.find(A, 2).is_none());
    }

    #[test]
    fn whoever_leases_a_forgotten_image_keeps_its_pages() {
        let mut pool = ImagePool::new(2);
        let a = published(&mut pool, A, 2);
        pool.forget(A, 2);
        assert!(pool.find(A, 2).is_none());
        assert!(pool.allocate(1).is_none());
        pool.release(a);
        assert_eq!(pool.counts().free, 2);
    }
}
