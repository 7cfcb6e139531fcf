//! Image files as clients sent them.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use forebay_engine::{Grid, ImageId, Payload, Picture, PictureError, Placement};
use forebay_http::Charge;
use forebay_vision::{Header, Identity, ImageError, Preparer, Processing};
use tokio::runtime::Handle;

use super::model::ImageModel;
use crate::intake::{Cost, Intake};

/// The maximum size in bytes of a buffer that a thread keeps for the next image.
const KEPT: usize = 32 << 20;

thread_local! {
    /// A thread's image preparer, and its buffer for patches before they are written to the arena.
    static WORKSHOP: RefCell<(Preparer, Vec<u8>)> = RefCell::default();
}

/// An image file whose header was read. It is charged to the budget until it is dropped.
pub(crate) struct ImageFile {
    bytes: Bytes,
    header: Header,
    processing: Processing,
    id: ImageId,
    param: String,
    charge: Charge,
}

impl fmt::Debug for ImageFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {:?}", self.bytes.len(), self.header)
    }
}

impl ImageFile {
    /// Reads the header of a file that was sent in the parameter `param`, and computes the image's
    /// id.
    ///
    /// # Errors
    /// The file is not an image, or is not supported.
    pub(crate) fn new(
        bytes: Bytes,
        model: &ImageModel,
        param: String,
        charge: Charge,
    ) -> Result<Self, ImageError> {
        let ImageModel { processing, ref limits, .. } = *model;
        let header = Header::read(&bytes, limits)?;
        let id = Identity::of(&bytes, &processing);
        let id = ImageId(u128::from_be_bytes(*id.as_bytes()));
        Ok(Self { bytes, header, processing, id, param, charge })
    }

    /// Returns how many rows and columns of positions the image takes.
    pub(crate) fn grid(&self) -> Grid {
        let grid = self.positions();
        Grid { rows: grid.height, columns: grid.width }
    }

    pub(crate) fn id(&self) -> ImageId {
        self.id
    }

    /// Returns the path of the request's parameter that contains the image.
    pub(crate) fn param(&self) -> &str {
        &self.param
    }

    fn positions(&self) -> forebay_vision::Grid {
        let (width, height) = self.header.size();
        self.processing.grid(width, height)
    }

    fn patch_bytes(&self) -> usize {
        self.processing.bytes(self.positions())
    }

    /// Returns the maximum memory in bytes for decoding the file and making patches.
    pub(crate) fn decoding_bytes(&self) -> usize {
        self.header.decoding_bytes(&self.processing)
    }

    /// Decodes the file and writes its patches to the arena.
    fn write(&self, payload: &dyn Payload) -> Result<(), PictureError> {
        WORKSHOP.with_borrow_mut(|(preparer, patches)| {
            patches.resize(self.patch_bytes(), 0);
            let prepared = preparer.prepare(&self.bytes, &self.header, &self.processing, patches);
            let written = match prepared {
                Ok(()) => payload
                    .write(0, patches)
                    .map_err(|error| PictureError::Failed(error.to_string())),
                Err(error) => Err(PictureError::Unreadable(error.to_string())),
            };
            if patches.capacity() > KEPT {
                *patches = Vec::new();
            }
            written
        })
    }
}

/// An image of a request in the engine.
pub(crate) struct Shown {
    file: Arc<ImageFile>,
    intake: Arc<Intake>,
    runtime: Handle,
}

impl fmt::Debug for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.file.fmt(f)
    }
}

impl Shown {
    /// Creates an image for a request that is submitted on the current runtime.
    pub(crate) fn new(file: Arc<ImageFile>, intake: &Arc<Intake>) -> Self {
        Self { file, intake: Arc::clone(intake), runtime: Handle::current() }
    }
}

impl Picture for Shown {
    fn place(&self, placement: Placement) {
        let (file, intake) = (Arc::clone(&self.file), Arc::clone(&self.intake));
        self.runtime.spawn(async move {
            let (client, bytes) = (file.charge.client(), file.patch_bytes());
            // Decoding time grows with the number of pixels, as memory does.
            let memory = file.decoding_bytes();
            let cost = Cost { time: memory as u64, memory };
            let write = move |payload: &dyn Payload| file.write(payload);
            let placed = intake.place_patches(client, bytes, cost, write).await;
            placement.done(placed);
        });
    }
}
