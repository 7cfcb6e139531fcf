//! The images of a request, and the prompts that they belong to.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::error::ApiError;
use crate::inert::Inert;
use crate::limits::bounds::param;
use crate::limits::{Bound, Param};

/// The URL of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageUrl {
    /// A `data:` URL with the file in base64, or an `http:`, `https:` or `file:` URL.
    pub url: String,
}

impl<'de> Deserialize<'de> for ImageUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ImageVisitor;
        impl<'de> Visitor<'de> for ImageVisitor {
            type Value = ImageUrl;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a URL, or an object with one")
            }
            fn visit_str<E>(self, url: &str) -> Result<ImageUrl, E> {
                Ok(ImageUrl { url: url.to_owned() })
            }
            fn visit_string<E>(self, url: String) -> Result<ImageUrl, E> {
                Ok(ImageUrl { url })
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ImageUrl, A::Error> {
                let image = ImageObject::deserialize(MapAccessDeserializer::new(map))?;
                Ok(ImageUrl { url: image.url })
            }
        }
        deserializer.deserialize_any(ImageVisitor)
    }
}

/// [`ImageUrl`] as an object.
#[derive(Deserialize)]
pub(crate) struct ImageObject {
    url: String,
    /// Accepted with any value: it has no effect.
    #[serde(default, rename = "detail")]
    _detail: Inert,
}

pub(crate) const IMAGE: &[Param] = &[param("url", Bound::Url), param("detail", Bound::Ignored)];

/// An image of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagePart {
    /// The path of the parameter with the image, for errors.
    pub param: String,
    /// The URL of the image.
    pub url: String,
}

/// The images that were found in a prompt so far.
pub(crate) struct Images {
    most: u32,
    pub(crate) found: Vec<ImagePart>,
}

impl Images {
    /// Creates an empty list of at most `most` images; 0 means that the model takes none.
    pub(crate) fn new(most: u32) -> Self {
        Self { most, found: Vec::new() }
    }

    /// True if the model does not take images.
    pub(crate) fn are_unseen(&self) -> bool {
        self.most == 0
    }

    /// Adds the image at `path`.
    ///
    /// # Errors
    /// The prompt has more images than the server allows.
    pub(crate) fn take(&mut self, path: String, image: ImageUrl) -> Result<(), ApiError> {
        if self.found.len() >= self.most as usize {
            let reason = format!(
                "`{path}`: the server takes at most {} images a request (--limit-images)",
                self.most
            );
            return Err(ApiError::invalid(path, reason));
        }
        self.found.push(ImagePart { param: path, url: image.url });
        Ok(())
    }
}

/// `image_data` of SGLang's native API: an image, a list of images, or a list of lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ImageData {
    One(ImageUrl),
    Many(Vec<Entry>),
}

/// An entry of a list of images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry {
    None,
    One(ImageUrl),
    Many(Vec<ImageUrl>),
}

impl ImageData {
    const PARAM: &str = "image_data";

    /// True if there is any image. Clients send empty values for parameters that they do not use.
    fn asks(&self) -> bool {
        match self {
            Self::One(image) => !image.url.is_empty(),
            Self::Many(entries) => entries.iter().any(|entry| match entry {
                Entry::None => false,
                Entry::One(_) => true,
                Entry::Many(images) => !images.is_empty(),
            }),
        }
    }

    /// Distributes the images over `count` prompts, with at most `most` each. In a batch (`many`)
    /// each prompt gets one entry of the list, or all get the same single image. A single prompt
    /// gets the whole list.
    ///
    /// # Errors
    /// The number of entries differs from the number of prompts, there are too many images, or the
    /// model takes none.
    pub(crate) fn share(
        self,
        count: usize,
        many: bool,
        most: u32,
    ) -> Result<Vec<Vec<ImagePart>>, ApiError> {
        const PARAM: &str = ImageData::PARAM;
        if !self.asks() {
            return Ok(vec![Vec::new(); count]);
        }
        if most == 0 {
            return Err(ApiError::unsupported(PARAM));
        }
        let of = |path: String, image: ImageUrl, images: &mut Images| {
            images.take(path, ImageUrl { url: with_scheme(image.url) })
        };
        let entry = |at: usize, entry: Entry, images: &mut Images| match entry {
            Entry::None => Ok(()),
            Entry::One(image) => of(format!("{PARAM}[{at}]"), image, images),
            Entry::Many(list) => list.into_iter().enumerate().try_for_each(|(of_list, image)| {
                of(format!("{PARAM}[{at}][{of_list}]"), image, images)
            }),
        };
        let entries = match self {
            Self::One(image) => {
                let mut images = Images::new(most);
                of(PARAM.into(), image, &mut images)?;
                return Ok(vec![images.found; count]);
            }
            Self::Many(entries) => entries,
        };
        if !many {
            let mut images = Images::new(most);
            for (at, of_list) in entries.into_iter().enumerate() {
                entry(at, of_list, &mut images)?;
            }
            return Ok(vec![images.found]);
        }
        if entries.len() != count {
            let reason = format!("`{PARAM}`: {} entries for {count} prompts", entries.len());
            return Err(ApiError::invalid(PARAM, reason));
        }
        let each = entries.into_iter().enumerate().map(|(at, of_prompt)| {
            let mut images = Images::new(most);
            entry(at, of_prompt, &mut images)?;
            Ok(images.found)
        });
        each.collect()
    }
}

/// Adds the scheme `data:` to plain base64, which SGLang's clients send.
fn with_scheme(url: String) -> String {
    if url.contains(':') { url } else { format!("data:;base64,{url}") }
}

impl<'de> Deserialize<'de> for ImageData {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match ImageList::<Entry>::deserialize(deserializer)? {
            ImageList::None => Self::Many(Vec::new()),
            ImageList::One(image) => Self::One(image),
            ImageList::Many(entries) => Self::Many(entries),
        })
    }
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match ImageList::<ImageUrl>::deserialize(deserializer)? {
            ImageList::None => Self::None,
            ImageList::One(image) => Self::One(image),
            ImageList::Many(images) => Self::Many(images),
        })
    }
}

/// A parameter that may be absent, one image, or a list.
enum ImageList<T> {
    None,
    One(ImageUrl),
    Many(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for ImageList<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListedVisitor<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ListedVisitor<T> {
            type Value = ImageList<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an image's URL or base64, or a list of them")
            }
            fn visit_unit<E>(self) -> Result<ImageList<T>, E> {
                Ok(ImageList::None)
            }
            fn visit_str<E>(self, url: &str) -> Result<ImageList<T>, E> {
                Ok(ImageList::One(ImageUrl { url: url.to_owned() }))
            }
            fn visit_string<E>(self, url: String) -> Result<ImageList<T>, E> {
                Ok(ImageList::One(ImageUrl { url }))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ImageList<T>, A::Error> {
                ImageUrl::deserialize(MapAccessDeserializer::new(map)).map(ImageList::One)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<ImageList<T>, A::Error> {
                let mut list = Vec::new();
                while let Some(entry) = seq.next_element()? {
                    list.push(entry);
                }
                Ok(ImageList::Many(list))
            }
        }
        deserializer.deserialize_any(ListedVisitor(std::marker::PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn shared(data: Value, count: usize, many: bool) -> Result<Vec<Vec<String>>, String> {
        let data: ImageData = serde_json::from_value(data).map_err(|error| error.to_string())?;
        let shared = data.share(count, many, 3).map_err(|error| error.to_string())?;
        let told = |part: ImagePart| format!("{} {}", part.param, part.url);
        Ok(shared.into_iter().map(|prompt| prompt.into_iter().map(told).collect()).collect())
    }

    fn found(data: Value, count: usize, many: bool) -> Vec<Vec<String>> {
        shared(data, count, many).expect("images")
    }

    #[test]
    fn a_prompt_alone_has_the_whole_list() {
        let one = vec![vec!["image_data http://a/b".to_owned()]];
        assert_eq!(found(json!("http://a/b"), 1, false), one);
        assert_eq!(found(json!({"url": "http://a/b", "detail": "low"}), 1, false), one);
        for detail in [json!("original"), json!(7), json!(null)] {
            assert_eq!(found(json!({"url": "http://a/b", "detail": detail}), 1, false), one);
        }
        let two = vec![vec!["image_data[0] data:;base64,aGk=", "image_data[1] file:///x"]];
        assert_eq!(found(json!(["aGk=", "file:///x"]), 1, false), two);
        let nested =
            vec![vec!["image_data[0][0] data:;base64,a", "image_data[0][1] data:;base64,b"]];
        assert_eq!(found(json!([["a", "b"]]), 1, false), nested);
        for nothing in [json!([]), json!(""), json!([null]), json!([[]])] {
            assert_eq!(found(nothing, 1, false), vec![Vec::<String>::new()]);
        }
    }

    #[test]
    fn prompts_of_a_batch_have_an_entry_each() {
        let mixed = found(json!(["http://a", null, ["http://b", "http://c"]]), 3, true);
        let expected: [&[&str]; 3] = [
            &["image_data[0] http://a"],
            &[],
            &["image_data[2][0] http://b", "image_data[2][1] http://c"],
        ];
        assert_eq!(mixed, expected);
        let same = found(json!("http://a"), 2, true);
        assert_eq!(same, [["image_data http://a"], ["image_data http://a"]]);
    }

    #[test]
    fn wrong_lists_are_told() {
        let error = |data, count, many| shared(data, count, many).expect_err("an error");
        assert!(error(json!(["a"]), 2, true).contains("1 entries for 2 prompts"));
        assert!(error(json!(["a", "b", "c", "d"]), 1, false).contains("at most 3 images"));
        assert!(error(json!(7), 1, false).contains("an image's URL"));
        assert!(error(json!([[["a"]]]), 1, false).contains("a URL"));
        let data: ImageData = serde_json::from_value(json!("a")).expect("data");
        assert!(data.share(1, false, 0).expect_err("unseen").to_string().contains("image_data"));
    }
}
