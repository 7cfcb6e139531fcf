//! An image as its client sent it.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use forebay_engine::{Grid, ImageId, Payload, Picture, PictureError, Placement};
use forebay_vision::{Geometry, ImageError, Prepared, identity, inspect, prepare};
use tokio::runtime::Handle;

use super::ImageModel;
use crate::budget::Charge;
use crate::intake::Intake;

/// The file of an image, whose header was read. It is charged to the budget as long as it lives.
pub(crate) struct ImageFile {
    bytes: Bytes,
    picture: forebay_vision::Picture,
    geometry: Geometry,
    id: ImageId,
    param: String,
    _charge: Charge,
}

impl fmt::Debug for ImageFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {:?}", self.bytes.len(), self.picture)
    }
}

impl ImageFile {
    /// Reads the header of a file that came in `param`, and names it.
    ///
    /// # Errors
    /// It is no image, or one that is not taken.
    pub(crate) fn new(
        bytes: Bytes,
        model: &ImageModel,
        param: String,
        charge: Charge,
    ) -> Result<Self, ImageError> {
        let ImageModel { geometry, limits, .. } = *model;
        let picture = inspect(&bytes, &geometry, limits)?;
        let id = ImageId(identity(&bytes, &geometry));
        Ok(Self { bytes, picture, geometry, id, param, _charge: charge })
    }

    /// Rows and columns of positions.
    pub(crate) fn grid(&self) -> Grid {
        let shape = self.picture.shape;
        Grid { rows: shape.rows, columns: shape.columns }
    }

    pub(crate) fn id(&self) -> ImageId {
        self.id
    }

    /// The path of its part.
    pub(crate) fn param(&self) -> &str {
        &self.param
    }

    fn prepare(&self) -> Result<Prepared, PictureError> {
        prepare(&self.bytes, &self.picture, &self.geometry).map_err(|error| match error {
            ImageError::NoRoom(reason) => PictureError::Failed(reason),
            error => PictureError::Unreadable(error.to_string()),
        })
    }

    fn patch_bytes(&self) -> usize {
        self.picture.shape.bytes()
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
    /// Of a request that is submitted by a task of the current runtime.
    pub(crate) fn new(file: Arc<ImageFile>, intake: &Arc<Intake>) -> Self {
        Self { file, intake: Arc::clone(intake), runtime: Handle::current() }
    }
}

impl Picture for Shown {
    fn place(&self, placement: Placement) {
        let (file, intake) = (Arc::clone(&self.file), Arc::clone(&self.intake));
        self.runtime.spawn(async move {
            let bytes = file.patch_bytes();
            let placed = intake.place_patches(bytes, move |payload| write(&file, payload)).await;
            placement.done(placed);
        });
    }
}

/// Decodes the file and writes its patches where the hand reads them.
fn write(file: &ImageFile, payload: &dyn Payload) -> Result<(), PictureError> {
    let mut at = 0;
    file.prepare()?
        .write(|band| {
            payload.write(at, band)?;
            at += band.len();
            Ok(())
        })
        .map_err(|error: std::io::Error| PictureError::Failed(error.to_string()))
}
