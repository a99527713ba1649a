"""The size to which an image is resized, and its number of embeddings, from its width and height.

The rules are those of the checkpoints' own processors, with the settings in preprocessor_config.json. This module uses only widths and heights, so
that prompts can be laid out without decoding an image (engine/text/image_prompt.py). engine/vision prepares images by the same rules.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.vision_config import MOST_SOFT_TOKENS, Gemma4Vision, SiglipVision
from pilotlight.engine.weights.checkpoint import read_json
from pilotlight.engine.weights.config import flag, number, positive_int, refusing_types


class ColorRule(NamedTuple):
    """The mean that is subtracted from each colour (0 to 1), and the divisor of the result."""

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @classmethod
    def read(
        cls, processor: Mapping[str, Any], default: "tuple[tuple[float, ...], tuple[float, ...]] | None" = None
    ) -> "ColorRule":
        found = []
        for key, usual in zip(("image_mean", "image_std"), default or cls(), strict=True):
            value = processor.get(key) or list(usual)
            if not isinstance(value, list) or len(value) != 3 or not all(isinstance(one, int | float) for one in value):
                raise CheckpointError(f"preprocessor_config.json has {key} = {value!r}; it must be three numbers")
            found.append((float(value[0]), float(value[1]), float(value[2])))
        return cls(*found)


class TileGrid(NamedTuple):
    """The tiles of an image; if there are several, a tile with the whole image follows."""

    rows: int
    columns: int
    width: int  # width of the resized image; the rest of the tiles is empty
    height: int

    @property
    def num_tiles(self) -> int:
        return self.rows * self.columns + (self.rows * self.columns > 1)


class TiledImages(NamedTuple):
    """Llama 4's rule: a canvas of at most `max_tiles` square tiles that changes the image's size least."""

    tile_size: int
    max_tiles: int
    fills_canvas: bool  # small images are enlarged to the largest canvas, too
    tile_tokens: int  # number of embeddings per tile
    patch_size: int
    placeholder: int  # id of the token that embeddings replace
    colors: ColorRule = ColorRule()

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any]) -> "TiledImages":
        """Read Llama 4's config.json and preprocessor_config.json. Raises CheckpointError."""
        vision = config["vision_config"]
        patch, tile = positive_int(vision, "patch_size", 14), positive_int(vision, "image_size", 336)
        size = processor.get("size") or {}
        if size and (size.get("height"), size.get("width")) != (tile, tile):
            raise CheckpointError(
                f"preprocessor_config.json has size = {size!r}; the vision tower takes tiles of {tile}"
            )
        shrinks = number(vision, "pixel_shuffle_ratio", 0.5)
        tokens = (tile // patch) ** 2 * shrinks**2
        if tokens < 1 or tokens != int(tokens):
            raise CheckpointError(
                f"config.json has pixel_shuffle_ratio = {shrinks}; it must divide {tile // patch} patches"
            )
        max_tiles = positive_int(processor, "max_patches", 16, _MOST_TILES)
        placeholder = positive_int(config, "image_token_index", positive_int(config, "image_token_id", 200092))
        fills = flag(processor, "resize_to_max_canvas", False)
        return cls(tile, max_tiles, fills, int(tokens), patch, placeholder, ColorRule.read(processor))

    def grid(self, width: int, height: int) -> TileGrid:
        side = self.tile_size
        rows, columns = _best_canvas(width, height, side, self.max_tiles, self.fills_canvas)
        inner_width, inner_height = columns * side, rows * side
        if not self.fills_canvas:  # small images are enlarged to one tile at most
            inner_width, inner_height = min(max(width, side), inner_width), min(max(height, side), inner_height)
        by_width, by_height = inner_width / width, inner_height / height
        if by_width < by_height:
            inner_height = min(math.floor(height * by_width), inner_height)
        else:
            inner_width = min(math.floor(width * by_height), inner_width)
        return TileGrid(rows, columns, max(inner_width, 1), max(inner_height, 1))


class PatchGrid(NamedTuple):
    """The patches of an image that keeps its proportions."""

    rows: int
    columns: int
    width: int  # width of the resized image; the rest of the patches is empty
    height: int


class PatchedImages(NamedTuple):
    """Kimi's rule: shrink an image to at most `max_patches` patches, and `max_side` patches per side.

    An embedding covers `merge` squared patches.
    """

    patch_size: int
    merge: int
    max_patches: int
    max_side: int
    placeholder: int  # id of the token that embeddings replace
    colors: ColorRule = ColorRule()

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any]) -> "PatchedImages":
        """Read K2.5's config.json and preprocessor_config.json. Raises CheckpointError.

        preprocessor_config.json has the keys of Moonshot (media_proc_cfg) or of transformers.
        """
        vision = config["vision_config"]
        own = processor.get("media_proc_cfg") or {}
        merge = vision.get("merge_kernel_size") or [2, 2]
        if not isinstance(merge, list | tuple) or len(set(merge)) != 1:
            raise CheckpointError(f"config.json has merge_kernel_size = {merge!r}; supported are squares")
        side = positive_int(own, "patch_limit_on_one_side", (processor.get("size") or {}).get("max_height", 512))
        most = positive_int(own, "in_patch_limit", positive_int(processor, "max_patches", 16384))
        placeholder = positive_int(config, "media_placeholder_token_id", positive_int(config, "image_token_id", 163605))
        colors = ColorRule.read(own or processor)
        return cls(positive_int(vision, "patch_size", 14), int(merge[0]), most, side, placeholder, colors)

    def grid(self, width: int, height: int) -> PatchGrid:
        patch, longest = self.patch_size, self.max_side * self.patch_size
        num_patches = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, math.sqrt(self.max_patches / num_patches), longest / height, longest / width)
        new_width, new_height = (min(max(1, int(side * scale)), longest) for side in (width, height))
        unit = self.merge * patch
        return PatchGrid(-(-new_height // unit) * self.merge, -(-new_width // unit) * self.merge, new_width, new_height)

    def num_tokens(self, width: int, height: int) -> int:
        grid = self.grid(width, height)
        return grid.rows * grid.columns // self.merge**2


_CLIP = ColorRule((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_MOST_TILES = 256  # most tiles of an image; Llama 4 has 16
_MOST_PATCHES = 16384  # most patches of an image, to limit an encoder's memory; a checkpoint's processor may allow four times as many


class ScaledImages(NamedTuple):
    """The rule of Qwen and GLM: scale an image to whole embeddings, within limits of its pixels.

    An embedding covers `merge` squared patches, and is rotated by its row and column.
    """

    patch_size: int
    merge: int
    least_pixels: int
    most_pixels: int
    placeholder: int  # id of the token that embeddings replace
    colors: ColorRule = _CLIP
    grows_first: bool = False  # GLM first enlarges an image with a side smaller than one embedding

    @classmethod
    def read_glm(cls, config: Mapping[str, Any], processor: Mapping[str, Any]) -> "ScaledImages":
        """Read GLM's files, whose pixel limits count an image as two video frames. Raises CheckpointError."""
        size = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000} | (processor.get("size") or {})
        read = cls.read({"image_token_id": 151343, **config}, {**processor, "size": size})
        most = min(positive_int(size, "longest_edge") // 2, _MOST_PATCHES * read.patch_size**2)
        return read._replace(
            least_pixels=-(-positive_int(size, "shortest_edge") // 2), most_pixels=most, grows_first=True
        )

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any]) -> "ScaledImages":
        """Read config.json and preprocessor_config.json. Raises CheckpointError."""
        vision, size = config["vision_config"], processor.get("size") or {}
        patch = positive_int(processor, "patch_size", positive_int(vision, "patch_size", 14))
        merge = positive_int(processor, "merge_size", positive_int(vision, "spatial_merge_size", 2))
        unit = (patch * merge) ** 2
        least = positive_int(processor, "min_pixels", positive_int(size, "shortest_edge", 4 * unit))
        most = positive_int(processor, "max_pixels", positive_int(size, "longest_edge", 1280 * unit))
        placeholder = positive_int(config, "image_token_id", 151655)
        most = min(most, _MOST_PATCHES * patch**2)
        if least > most:
            raise CheckpointError(
                f"preprocessor_config.json has min_pixels or shortest_edge = {least}; an image may have {most} pixels at most"
            )
        return cls(patch, merge, least, most, placeholder, ColorRule.read(processor, _CLIP))

    def grid(self, width: int, height: int) -> PatchGrid:
        unit = self.patch_size * self.merge
        if self.grows_first and min(width, height) < unit:
            scale = max(unit / height, unit / width)
            width, height = int(width * scale), int(height * scale)
        rows, columns = (round(side / unit) for side in (height, width))
        if rows * columns * unit**2 > self.most_pixels:
            scale = math.sqrt(height * width / self.most_pixels)
            rows, columns = (max(1, math.floor(side / scale / unit)) for side in (height, width))
        elif rows * columns * unit**2 < self.least_pixels:
            scale = math.sqrt(self.least_pixels / (height * width))
            rows, columns = (math.ceil(side * scale / unit) for side in (height, width))
        return PatchGrid(rows * self.merge, columns * self.merge, columns * unit, rows * unit)

    def num_tokens(self, width: int, height: int) -> int:
        grid = self.grid(width, height)
        return grid.rows * grid.columns // self.merge**2


class RowedImages(NamedTuple):
    """Mistral's rule: shrink an image to sides of at most `longest` pixels, rounded up to embeddings.

    An embedding covers `merge` squared patches; a separator follows each row of embeddings.
    """

    patch_size: int
    merge: int
    longest: int
    placeholder: int  # id of the token that embeddings replace
    colors: ColorRule = _CLIP

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any]) -> "RowedImages":
        """Read config.json and preprocessor_config.json. Raises CheckpointError."""
        vision = config["vision_config"]
        patch, merge = positive_int(vision, "patch_size", 16), positive_int(config, "spatial_merge_size", 2)
        size = processor.get("size") or {}
        longest = positive_int(size, "longest_edge", positive_int(vision, "image_size", 1024))
        longest = min(longest, math.isqrt(_MOST_PATCHES) * patch)
        placeholder = positive_int(config, "image_token_index", positive_int(config, "image_token_id", 10))
        return cls(patch, merge, longest, placeholder, ColorRule.read(processor, _CLIP))

    def grid(self, width: int, height: int) -> PatchGrid:
        shrunk = max(1.0, height / self.longest, width / self.longest)
        unit = self.patch_size * self.merge
        rows, columns = (max(1, -(-math.floor(side / shrunk) // unit)) for side in (height, width))
        return PatchGrid(rows * self.merge, columns * self.merge, columns * unit, rows * unit)


class SquareImages(NamedTuple):
    """Gemma 3's rule: every image is resized to one square."""

    patch_size: int
    merge: int  # `merge` x `merge` patches become one embedding
    side: int  # patches per row and column
    placeholder: int  # id of the token that embeddings replace
    colors: ColorRule = ColorRule()

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any]) -> "SquareImages":
        """Read config.json and preprocessor_config.json. Raises CheckpointError."""
        vision, size = SiglipVision.read(config), processor.get("size") or {}
        pixels = vision.side * vision.patch_size
        if size and (size.get("height"), size.get("width")) != (pixels, pixels):
            raise CheckpointError(
                f"preprocessor_config.json has size = {size!r}; the vision tower takes images of {pixels} x {pixels}"
            )
        if flag(processor, "do_pan_and_scan", False):
            raise CheckpointError(
                "preprocessor_config.json has do_pan_and_scan = true; images are not cut into crops here"
            )
        placeholder = positive_int(config, "image_token_index", positive_int(config, "image_token_id", 262_144))
        return cls(vision.patch_size, vision.merge, vision.side, placeholder, ColorRule.read(processor))

    def grid(self, width: int, height: int) -> PatchGrid:
        pixels = self.side * self.patch_size
        return PatchGrid(self.side, self.side, pixels, pixels)


class FilledImages(NamedTuple):
    """Gemma 4's rule: scale an image to whole embeddings, as many as fit into a number of them."""

    patch_size: int
    merge: int  # `merge` x `merge` patches become one embedding
    most_tokens: int
    placeholder: int  # id of the token that embeddings replace
    enclosing: tuple[int, int]  # ids of the tokens before and after an image
    is_bidirectional: bool  # an image's tokens attend to each other in both directions

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any]) -> "FilledImages":
        """Read config.json and preprocessor_config.json. Raises CheckpointError."""
        vision = Gemma4Vision.read(config["vision_config"])
        for key, size in (("patch_size", vision.patch_size), ("pooling_kernel_size", vision.merge)):
            if positive_int(processor, key, size) != size:
                raise CheckpointError(
                    f"preprocessor_config.json has {key} = {processor[key]!r}; the vision tower's is {size}"
                )
        if flag(processor, "do_normalize", False):
            raise CheckpointError("preprocessor_config.json has do_normalize = true; colours are not normalised here")
        most = positive_int(processor, "max_soft_tokens", 280)
        if most > MOST_SOFT_TOKENS:
            raise CheckpointError(
                f"preprocessor_config.json has max_soft_tokens = {most}; an image may have {MOST_SOFT_TOKENS} at most"
            )
        enclosing = positive_int(config, "boi_token_id", 255_999), positive_int(config, "eoi_token_id", 258_882)
        mutual = (config.get("text_config") or {}).get("use_bidirectional_attention") == "vision"
        placeholder = positive_int(config, "image_token_id", 258_880)
        return cls(vision.patch_size, vision.merge, most, placeholder, enclosing, mutual)

    def grid(self, width: int, height: int) -> PatchGrid:
        unit = self.patch_size * self.merge
        factor = math.sqrt(self.most_tokens * unit**2 / (height * width))
        rows, columns = (math.floor(factor * side / unit) for side in (height, width))
        if not rows:  # far wider than high: a row of embeddings
            rows, columns = 1, min(width // height, self.most_tokens)
        elif not columns:
            rows, columns = min(height // width, self.most_tokens), 1
        return PatchGrid(rows * self.merge, columns * self.merge, columns * unit, rows * unit)

    def num_tokens(self, width: int, height: int) -> int:
        grid = self.grid(width, height)
        return grid.rows * grid.columns // self.merge**2


ImageSizes = TiledImages | PatchedImages | ScaledImages | RowedImages | SquareImages | FilledImages
_READERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], ImageSizes]] = {
    "Gemma3ForConditionalGeneration": SquareImages.read,
    "Gemma4ForConditionalGeneration": FilledImages.read,
    "Glm46VForConditionalGeneration": ScaledImages.read_glm,
    "Glm4vForConditionalGeneration": ScaledImages.read_glm,
    "Glm4vMoeForConditionalGeneration": ScaledImages.read_glm,
    "KimiK25ForConditionalGeneration": PatchedImages.read,
    "Llama4ForConditionalGeneration": TiledImages.read,
    "Mistral3ForConditionalGeneration": RowedImages.read,
    "Qwen2_5_VLForConditionalGeneration": ScaledImages.read,
    "Qwen3VLForConditionalGeneration": ScaledImages.read,
    "Qwen3VLMoeForConditionalGeneration": ScaledImages.read,
    "Qwen3_5ForConditionalGeneration": ScaledImages.read,
    "Qwen3_5MoeForConditionalGeneration": ScaledImages.read,
}


def read_image_sizes(folder: Path) -> ImageSizes | None:
    """Return a checkpoint's rule for images, or None if images are not supported. Raises CheckpointError."""
    config = read_json(folder, "config.json")
    with refusing_types(f"config.json or preprocessor_config.json in {folder}"):
        read = next((_READERS[name] for name in config.get("architectures") or () if name in _READERS), None)
        if read is None or not config.get("vision_config"):
            return None
        return read(config, _processor(folder))


def _processor(folder: Path) -> dict[str, Any]:
    """Return the settings of a checkpoint's image processor, or {}.

    They are in preprocessor_config.json, or in a part of processor_config.json.
    """
    if (folder / "preprocessor_config.json").exists():
        return read_json(folder, "preprocessor_config.json")
    if (folder / "processor_config.json").exists():
        return dict(read_json(folder, "processor_config.json").get("image_processor") or {})
    return {}


@lru_cache(maxsize=256)
def _best_canvas(width: int, height: int, side: int, max_tiles: int, fills_canvas: bool) -> tuple[int, int]:
    """Return the rows and columns of the best canvas.

    On it the image grows least, or most with `fills_canvas`. If the image is too large for every canvas, the best one shrinks it least. Of equal
    canvases the smallest is taken.
    """
    canvases = [(rows, columns) for rows in range(1, max_tiles + 1) for columns in range(1, max_tiles // rows + 1)]
    scales = {(rows, columns): min(rows * side / height, columns * side / width) for rows, columns in canvases}
    growing = [scale for scale in scales.values() if scale >= 1]
    best = (max(growing) if fills_canvas else min(growing)) if growing else max(scales.values())
    return min((canvas for canvas in canvases if scales[canvas] == best), key=lambda canvas: canvas[0] * canvas[1])
