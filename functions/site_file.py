"""The functions and the buckets that a site's file names."""

from pathlib import Path

from msgspec.structs import asdict

from pilotlight.functions.bindings.storage.s3 import S3Place
from pilotlight.functions.manifest import FILES, Manifest, ManifestError, load_manifest
from pilotlight.sites.site import FunctionsConfig


def manifests_of(config: FunctionsConfig) -> dict[str, tuple[Manifest, tuple[Path, ...]]]:
    """Return the functions of the site file by name, each with its layers. Raises ManifestError."""
    found: dict[str, tuple[Manifest, tuple[Path, ...]]] = {}
    for function in config.serve:
        layers = (Path(function.layer).expanduser(),) if function.layer is not None else ()
        for layer in layers:
            if not layer.is_dir():
                raise ManifestError(
                    f"functions.serve: the layer {function.layer!r} of {function.name!r} is no directory"
                )
        found[function.name] = load_manifest(Path(function.path).expanduser(), function.environment), layers
    if config.directory is not None:
        folder = Path(config.directory).expanduser()
        if not folder.is_dir():
            raise ManifestError(f"functions.directory: {config.directory!r} is no directory: make it, or name another")
        for child in sorted(folder.iterdir()):
            if any((child / name).is_file() for name in FILES):
                manifest = load_manifest(child)
                if manifest.name in found:
                    raise ManifestError(f"{child}: a function named {manifest.name!r} is served already")
                found[manifest.name] = manifest, ()
    return found


def r2_stores(config: FunctionsConfig) -> dict[str, S3Place]:
    """Return the buckets at S3 endpoints by R2 name."""
    return {name: S3Place(**{**asdict(store), "bucket": store.bucket or name}) for name, store in config.r2.items()}
