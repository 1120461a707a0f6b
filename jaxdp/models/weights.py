"""Reads and writes safetensors files of weights: of ResNets with jaxdp's, torchvision's or timm's names, of registered
models with jaxdp's."""

import dataclasses
import hashlib
import io
import json
import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save as serialize

from jaxdp import models
from jaxdp.config import Model as ModelConfig
from jaxdp.config import Preprocessing, Stem
from jaxdp.errors import ConfigError, Unusable, first_line, plural
from jaxdp.files import check_local, check_output, expand_user, read_regular, write_output
from jaxdp.models import preprocessing
from jaxdp.models.resnet import BLOCKS, BOTTLENECK_DEPTHS
from jaxdp.models.torch_weights import COUNTER, from_torch_layout, torch_name, torch_shape

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F64": np.float64}
DEPTHS = get_args(get_type_hints(ModelConfig)["depth"])
# The fields of config.Model that determine the tensors.
NETWORK_FIELDS = ("depth", "width", "stem", "shortcut", "classes", "blur_pool")
BLOCK = re.compile(r"layer(\d+)\.(\d+)\.")
POOLED = re.compile(r"layer\d+\.\d+\.downsample\.2\.")
FIRST_KERNELS = ("conv1.weight", "conv1.0.weight")  # and of a deep stem; the former is also the first one of each block
LISTED = 10  # names of tensors in a message
TREES = ("params/", "batch_stats/")
ROUNDED = "rounded from float64 to float32"
CLASSIFIER = ("params/fc_kernel", "params/fc_bias")
TRUNK = re.compile(r"(conv1|bn1|layer\d+)\.")  # torchvision's names but for the classifier's
SHARD = re.compile(r"-\d+-of-(\d+)\.")
UNPACK = "unpack it, and give the .safetensors file in it"
CONVERT = "give weights as a .safetensors file"
JOIN = "join the files with safetensors.torch.load_file and save_file"
# Files that are not safetensors: (pattern of their beginning, what they are, hint).
FOREIGN_FILES = (
    (rb"version https://git-lfs", "a Git LFS pointer, in place of the file", "run `git lfs pull` where it was cloned"),
    (
        rb"\s*(<\?xml[^>]*>\s*)?<(!doctype html|html|head|body)",
        "an HTML page",
        "download the file itself; a login may be needed",
    ),
    (rb"\s*<\?xml", "an XML text, such as an error of object storage", "download the file again"),
    (rb'\s*\{(?s:.*)"weight_map"', "the index of weights in several files", JOIN),
    (rb"\s*[\[{]", "a JSON text", CONVERT),
    (rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf", "a compressed file", UNPACK),
    (rb"(?s:.{257})ustar", "a tar archive", UNPACK),
    (rb"PK\x03\x04", "a zip archive", UNPACK),
    (rb"\x89HDF", "an HDF5 file, as of Keras", CONVERT),
    (rb"\x93NUMPY", "a NumPy file", CONVERT),
    (rb"GGUF", "a GGUF file", CONVERT),
    (rb"$", "empty", "download it again"),
)


class Tensor(NamedTuple):
    """A tensor as stored in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Weights(NamedTuple):
    """The content of a weight file.

    model: the fields of `NETWORK_FIELDS`; params, batch_stats: float32 trees of host arrays; naming: "jaxdp" or "torchvision";
    digest: 16 hexadecimal digits of SHA-256 over names, shapes and float32 values, equal for equal weights in any file; notes:
    the conversions during reading.
    """

    path: str
    model: ModelConfig
    params: dict
    batch_stats: dict
    naming: str
    digest: str
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line: network, classes, naming, conversions."""
        model = self.model
        naming = "jaxdp's names" if self.naming == "jaxdp" else "torchvision's and timm's names"
        stem = ", small stem" if model.stem == "small" else ""
        width = "" if model.width == 64 else f", width {model.width}"
        classes = f", {plural(model.class_count, 'class')}" if "fc_bias" in self.params else ""
        return ", ".join([f"{model.title}{width}{stem}{classes}, with {naming}", *self.notes])


class NamedTensors(NamedTuple):
    """Tensors of a network of any kind by name, such as params/net/head/kernel, in float32.

    source: where they are from, for messages. digest: as in `Weights`. notes: the conversions during reading. rooted: whether
    names have the first part that registered models have in a file.
    """

    source: str
    tensors: dict[str, np.ndarray]
    digest: str
    notes: tuple[str, ...] = ()
    rooted: bool = True


def read(path: str | Path, field: str = "FILE", *, blur_pool: str = "none", new_classes: int | None = None) -> Weights:
    """Read a file of a ResNet; its tensor names decide whether it is jaxdp's or torchvision's. field: for error messages.

    blur_pool: `model.blur_pool` of a file that states none: names and shapes are the same with timm's BlurPool and without.
    new_classes: the number of classes for a file without a classifier, whose `params` then lack it; None refuses such a file.

    Raises ConfigError for a missing file, a different format or network, missing or unexpected tensors, wrong shapes, values
    that are not finite, and negative variances.
    """
    return _read(path, field, lambda name, data: _parse(name, data, blur_pool=blur_pool, new_classes=new_classes))


def read_named(path: str | Path, field: str) -> NamedTensors:
    """Read the tensors params/... and batch_stats/... of a safetensors file, which `jaxdp export` has written for any model.

    Raises ConfigError for a missing file, a different format, no such tensors, types other than floating-point numbers, values
    that are not finite, and negative variances.
    """
    return _read(path, field, _parse_named)


def _read(path: str | Path, field: str, parse: Callable[[str, bytes], Any]) -> Any:
    check_local(path, field)
    path = expand_user(path, field)
    try:
        return parse(str(path), read_regular(path, preprocessing.MAX_FILE_BYTES))
    except FileNotFoundError:
        hint = "" if os.path.dirname(path) else "jaxdp downloads no weights, see docs/weights.md"
        raise ConfigError(field, str(path), reason="file not found", hint=hint) from None
    except OSError as error:
        raise ConfigError(field, str(path), reason=error.strerror or str(error), hint="give a .safetensors file") from None
    except Unusable as error:
        shard = SHARD.search(os.path.basename(path))
        reason, hint = (f"it is one of {int(shard[1])} files: {error.reason}", JOIN) if shard else (error.reason, error.hint)
        raise ConfigError(field, str(path), reason=reason, hint=hint) from None


def _stored_tensors(data: bytes) -> dict[str, Tensor]:
    try:
        return {name: Tensor(item["dtype"], tuple(item["shape"]), item["data"]) for name, item in deserialize(data)}
    except (SafetensorError, ValueError, OverflowError, MemoryError) as error:
        if _is_pickled(data):
            hint = "if you trust it, convert it to safetensors with PyTorch, as docs/weights.md shows"
            raise Unusable("the file is a pickle, and reading it could run code in it", hint) from None
        for start, kind, hint in FOREIGN_FILES:
            if re.match(start, data, re.IGNORECASE):
                raise Unusable(f"not a safetensors file: it is {kind}", hint) from None
        raise Unusable(f"not a safetensors file ({first_line(error)})") from None


def _parse_named(path: str, data: bytes) -> NamedTensors:
    stored = _stored_tensors(data)
    named = {name: tensor for name, tensor in stored.items() if name.startswith(TREES)}
    if not named:
        found = f"tensors such as {min(stored)!r}" if stored else "no tensors"
        hint = "give a file that `jaxdp export` has written, or its names: params/net/PATH and batch_stats/net/PATH"
        raise Unusable(f"no names of jaxdp: the file has {found}", hint)
    tensors = {name: _convert(name, tensor, shape=tensor.shape, naming="jaxdp") for name, tensor in named.items()}
    notes = [ROUNDED] * any(tensor.dtype == "F64" for tensor in named.values())
    others = stored.keys() - named.keys()
    notes += [f"neither params nor batch_stats, so left out: {listed(others)}"] * bool(others)
    return NamedTensors(path, tensors, digest_of(tensors), tuple(notes))


def _parse(path: str, data: bytes, *, blur_pool: str, new_classes: int | None) -> Weights:
    stored = _stored_tensors(data)
    stored, notes = _strip_prefix({name: tensor for name, tensor in stored.items() if name.split(".")[-1] != COUNTER})
    naming = "jaxdp" if any(name.startswith(TREES) for name in stored) else "torchvision"
    shapes = _torch_shapes(stored, naming)
    lacks_classifier = "fc.bias" not in shapes
    if new_classes is not None and lacks_classifier:  # in its place, a backbone has a layer of a different task
        kept = {name for name in stored if TRUNK.match(torch_name(name) if naming == "jaxdp" else name)}
        others = listed(stored.keys() - kept)
        notes += ("no classifier" + f", so left out: {others}" * bool(others),)
        stored = {name: tensor for name, tensor in stored.items() if name in kept}
        shapes = _torch_shapes(stored, naming) | {"fc.bias": (new_classes,)}
    model = _network(shapes)
    try:
        stated = preprocessing.stated_blur_pool(path, preprocessing.metadata_of(data))
    except ValueError as error:
        raise Unusable(str(error)) from None
    form: Any = stated or blur_pool
    model = dataclasses.replace(model, blur_pool=form)
    expected = named_tensors(*models.initial_shapes(models.create(model, platform="any"), (32, 32, 3)))
    if lacks_classifier:
        expected = {name: like for name, like in expected.items() if name not in CLASSIFIER}
    names = {name: name if naming == "jaxdp" else torch_name(name) for name in expected}
    _check_names(stored, set(names.values()), model)
    tensors = {
        name: _convert(names[name], stored[names[name]], shape=like.shape, naming=naming) for name, like in expected.items()
    }
    if any(tensor.dtype == "F64" for tensor in stored.values()):
        notes += (ROUNDED,)
    if stated is None:
        notes += (f"the file does not name its BlurPool; assumed: {blur_pool.replace('_', ' ')}",)
    trees = unflatten_dict(tensors, sep="/")
    return Weights(path, model, trees["params"], trees["batch_stats"], naming, digest_of(tensors), notes)


def _torch_shapes(stored: dict[str, Tensor], naming: str) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors by torchvision's names, in its layouts."""
    if naming == "torchvision":
        return {name: tensor.shape for name, tensor in stored.items()}
    return {torch_name(name): torch_shape(tensor.shape) for name, tensor in stored.items() if name.startswith(TREES)}


def digest_of(tensors: dict[str, np.ndarray]) -> str:
    """`Weights.digest` of float32 tensors by path."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.shape}\0".encode() + tensor.tobytes())
    return sha.hexdigest()[:16]


def _is_pickled(data: bytes) -> bool:
    """Whether the bytes are a pickle, or the zip with a pickle that torch.save writes."""
    if data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return True
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


def _strip_prefix(stored: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """(tensors of the network without the prefix that a wrapper adds to their names, notes).

    Tensors without the prefix are omitted, such as `n_averaged` of torch.optim.swa_utils.AveragedModel; notes name them.
    """
    starts = {name.removesuffix(kernel) for kernel in FIRST_KERNELS for name in stored if name.endswith(kernel)}
    prefixes = sorted(prefix for prefix in starts if f"{prefix}layer1.0.conv1.weight" in stored)  # not of one of its blocks
    if len(prefixes) > 1:
        reason = f"the file has the weights of {len(prefixes)} networks, with the prefixes {', '.join(map(repr, prefixes))}"
        raise Unusable(reason, "save only the tensors of one of them")
    prefix = prefixes[0] if prefixes else ""
    if not prefix:
        return stored, ()
    notes = [f"prefix {prefix!r} removed"]
    if foreign := [name for name in stored if not name.startswith(prefix)]:
        notes.append(f"{plural(len(foreign), 'tensor')} without it left out: {listed(foreign)}")
    return {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}, tuple(notes)


def listed(names: Iterable[str]) -> str:
    """The first names of tensors in alphabetical order, and the number of others."""
    ordered = sorted(names)
    return ", ".join(map(repr, ordered[:LISTED])) + f" and {len(ordered) - LISTED} more" * (len(ordered) > LISTED)


def _network(shapes: dict[str, tuple[int, ...]]) -> ModelConfig:
    """Depth, width, stem, shortcut and classes, from torchvision's names and the shapes of its layouts."""
    plain, deep = FIRST_KERNELS
    kernel = deep if deep in shapes else plain
    if kernel not in shapes:
        found = f"tensors such as {min(shapes)!r}" if shapes else "no tensors"
        hint = "give torchvision's or timm's names ('conv1.weight', 'layer1.0.bn1.weight') or jaxdp's ('params/conv1/kernel')"
        raise Unusable(f"not a ResNet with known names: the file has {found}", hint)
    blocks = {match.groups() for match in map(BLOCK.match, shapes) if match}
    stages = Counter(int(stage) for stage, _ in blocks)
    counts = tuple(stages[stage] for stage in sorted(stages))
    bottleneck = "layer1.0.conv3.weight" in shapes
    depth = next((n for n in DEPTHS if BLOCKS[n] == counts and (n in BOTTLENECK_DEPTHS) == bottleneck), None)
    if depth is None:
        kind = "bottleneck" if bottleneck else "basic"
        known = ", ".join(map(str, DEPTHS))
        raise Unusable(f"ResNet stages of {counts} {kind} blocks match no ResNet of depth {known}")
    head = shapes.get("fc.bias", ())
    if len(head) != 1 or not head[0]:
        raise Unusable("no classifier bias 'fc.bias' of shape [classes]", "give weights with it; only fine-tuning takes others")
    stems: dict[tuple[str, tuple[int, ...]], Stem] = {
        (plain, (3, 7, 7)): "imagenet",
        (plain, (3, 3, 3)): "small",
        (deep, (3, 3, 3)): "deep",
    }
    stem = stems.get((kernel, shapes[kernel][1:]))
    if stem is None:
        raise Unusable(f"unknown stem: {kernel} has shape {shapes[kernel]}", "give a 7x7 or 3x3 stem over RGB")
    width = shapes[kernel][0] * (2 if stem == "deep" else 1)
    _check_is_resnet(shapes, depth, width)
    return ModelConfig(
        depth=depth,
        width=width,
        stem=stem,
        shortcut="pooled" if any(map(POOLED.match, shapes)) else "strided",
        classes=head[0],
    )


def _check_is_resnet(shapes: dict[str, tuple[int, ...]], depth: int, width: int) -> None:
    """Refuse a network with squeeze-and-excitation, a ResNeXt and a wide ResNet. width: channels of the stem."""
    inner, _, *_ = *shapes.get("layer1.0.conv1.weight", ()), width, 0
    _, of_group, *_ = *shapes.get("layer1.0.conv2.weight", ()), 0, inner
    kind = f"ResNet-{depth} with squeeze-and-excitation" if "layer1.0.se.fc1.weight" in shapes else None
    if of_group and inner % of_group == 0 and inner > of_group:
        kind = f"ResNeXt-{depth} ({inner // of_group}x{of_group}d)"
    elif inner % width == 0 and inner > width:
        kind = f"wide ResNet-{depth} ({inner // width} times as wide)"
    if kind:
        raise Unusable(f"a {kind} is not supported", f"give weights of a ResNet-{depth}")


def _check_names(stored: dict[str, Tensor], expected: set[str], model: ModelConfig) -> None:
    for names, kind in ((expected - stored.keys(), "missing"), (stored.keys() - expected, "unexpected")):
        if names:
            tensors = f"tensor {min(names)!r}" if len(names) == 1 else f"tensors, {min(names)!r} first"
            alone = "give a file of the network alone, without filters of BlurPool"
            hint = "give a complete file" if kind == "missing" else alone
            raise Unusable(f"{len(names)} {kind} {tensors}, for a {model.title}", hint)


def _convert(name: str, stored: Tensor, *, shape: tuple[int, ...], naming: str) -> np.ndarray:
    """A stored tensor in float32 and in jaxdp's layout, whose shape must be `shape`; float16 and bfloat16 convert exactly."""
    if stored.dtype not in DTYPES:
        raise Unusable(f"{name} has dtype {stored.dtype}", f"convert it to one of {', '.join(DTYPES)}")
    raw = np.frombuffer(stored.data, DTYPES[stored.dtype]).reshape(stored.shape)
    with np.errstate(over="ignore"):  # float64 beyond the range of float32 becomes infinite and is rejected below
        tensor = (raw.astype(np.uint32) << 16).view(np.float32) if stored.dtype == "BF16" else raw.astype(np.float32)
    if not np.isfinite(tensor).all():
        raise Unusable(f"{name} has values that are not finite")
    if naming == "torchvision":
        tensor = from_torch_layout(tensor)
    if tensor.shape != shape:
        expected = shape if naming == "jaxdp" else torch_shape(shape)
        raise Unusable(f"{name} has shape {stored.shape}, expected {expected}")
    if name.endswith(("/var", ".running_var")) and (tensor < 0).any():
        raise Unusable(f"{name} has a negative variance")
    return tensor


def named_tensors(params: dict, batch_stats: dict) -> dict:
    """The leaves of both trees by path, such as params/layer1_0/conv1/kernel."""
    trees = {"params": params, "batch_stats": batch_stats}
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(trees)}


def network_json(model: ModelConfig) -> str:
    """The fields of a model that its weights depend on, as JSON."""
    return json.dumps({name: getattr(model, name) for name in NETWORK_FIELDS})


def check_output_path(output: str | Path, overwrite: bool, *, suffix: str = ".safetensors", field: str = "--output") -> Path:
    """The path of a file to write. Raises ConfigError if it has a different suffix or cannot be written."""
    if Path(output).suffix != suffix:
        raise ConfigError(field, str(output), reason=f"must end in {suffix}")
    return check_output(output, overwrite, field)


def save(output: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> int:
    """Write a safetensors file atomically and return its size in bytes. Raises OSError with the file's name."""
    data = serialize(tensors, metadata)
    write_output(output, data)
    return len(data)


def import_file(
    path: str | Path,
    output: str | Path,
    *,
    expected: dict | None = None,
    given: Preprocessing | None = None,
    overwrite: bool = False,
) -> dict:
    """Convert a file with torchvision's or timm's names into one with jaxdp's.

    expected: required depth, classes, stem or blur_pool; None values are ignored, and a blur_pool holds for a file that states
    none. given: preprocessing that replaces what the file states.
    Returns {"output", "tensors", "bytes", "model", "preprocessing", "digest", "notes"}. Raises ConfigError as `read` does, for
    invalid preprocessing, and if the network is not the expected one.
    """
    path, output = expand_user(path, "FILE"), check_output_path(output, overwrite)
    expected = expected or {}
    weights = read(path, blur_pool=expected.get("blur_pool") or "none")
    if weights.naming == "jaxdp":
        raise ConfigError("FILE", str(path), reason="the file already has jaxdp's names", hint="use it without importing")
    for name, value in expected.items():
        actual = getattr(weights.model, name)
        if value not in (None, actual):
            raise ConfigError(
                f"--{name.replace('_', '-')}", value, reason=f"{str(path)!r} has {name} {actual!r}", hint="give another file"
            )
    tensors = named_tensors(weights.params, weights.batch_stats)
    network = network_json(weights.model)
    merged = preprocessing.merge(preprocessing.of_file(path), given or Preprocessing())
    stated = preprocessing.as_dict(preprocessing.checked(vars(merged)))
    metadata = {"model": network, "source": Path(path).name, "source_digest": weights.digest}
    metadata |= {preprocessing.METADATA: json.dumps(stated)} if stated else {}
    return {
        "output": str(output),
        "tensors": len(tensors),
        "bytes": save(output, tensors, metadata),
        "model": json.loads(network),
        "preprocessing": stated,
        "digest": weights.digest,
        "notes": list(weights.notes),
    }
