"""Files of weights: safetensors in our own names, or in those of torchvision and timm, read into trees and written."""

import hashlib
import io
import itertools
import json
import re
import zipfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

import jax
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save as as_safetensors

from jaxdp import models
from jaxdp.config import ConfigError
from jaxdp.config import Model as ModelConfig
from jaxdp.errors import first_line
from jaxdp.files import check_output, write_whole
from jaxdp.models.resnet import BLOCKS, BOTTLENECK_DEPTHS
from jaxdp.models.torch_weights import COUNTER, our_layout, torch_layout, torch_name

READ = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F64": np.float64}
DEPTHS = get_args(get_type_hints(ModelConfig)["depth"])
BLOCK = re.compile(r"^(?:params/)?layer(\d+)[._](\d+)[./]")
THIRD = re.compile(r"^(?:params/)?layer1[._]0[./]conv3[./]")
PREFIX = re.compile(r"(?:(?:module|model|state_dict|_orig_mod)\.)+")
THEIRS = re.compile(r"(?:(?:layer\d+\.\d+\.)?(?:conv|bn)\d|layer\d+\.\d+\.downsample\.[01]|fc)\.[a-z_]+")


class Weights(NamedTuple):
    """What a file holds. model: depth, width, stem and classes; params, batch_stats: float32 trees of host arrays.

    form: "jaxdp" or "torchvision", by the names; digest: of the tensors as they are here, 16 hexadecimal digits of SHA-256,
    which is the same for the same weights in any file; remarks: what had to be done to read them.
    """

    path: str
    model: ModelConfig
    params: dict
    batch_stats: dict
    form: str
    digest: str
    remarks: tuple[str, ...] = ()

    @property
    def in_words(self) -> str:
        one = self.model
        whose = "jaxdp's" if self.form == "jaxdp" else "torchvision's and timm's"
        stem = "" if one.stem == "imagenet" else ", small stem"
        width = "" if one.width == 64 else f", width {one.width}"
        told = f"ResNet-{one.depth}{width}{stem}, {one.classes} classes, with {whose} names"
        return ", ".join([told, *self.remarks])


def read(path, what: str = "FILE") -> Weights:
    """The weights in a safetensors file, its format known by the names of its tensors. what: the flag or field, for errors.

    Raises ConfigError for a file that is not there, of another kind, not of a ResNet of ours, with tensors missing, left over
    or of a wrong shape, or with numbers that cannot be (not finite, a variance below zero).
    """
    refused = f"{what}: {str(path)!r} is not allowed"
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{refused}; {error.strerror}; give a .safetensors file") from None
    try:
        held = {name: (one["dtype"], tuple(one["shape"]), one["data"]) for name, one in deserialize(data)}
    except (SafetensorError, ValueError, OverflowError, MemoryError) as error:
        if _is_pickled(data):
            raise ConfigError(_how_to_convert(path, refused)) from None
        raise ConfigError(f"{refused}; it is no safetensors file ({first_line(error)}); give one") from None
    held = {name: one for name, one in held.items() if name.split(".")[-1] != COUNTER}
    held, remarks = _without_prefix(held)
    form = _form(held, refused)
    model = _network({name: shape for name, (_, shape, _) in held.items()}, form, refused)
    params, batch_stats = _expected(model)
    wanted = named(params, batch_stats)
    names = {name: name if form == "jaxdp" else torch_name(name) for name in wanted}
    _check_names(held, set(names.values()), model, refused)
    tensors = {}
    for name, like in wanted.items():
        tensor = _tensor(names[name], *held[names[name]], refused)
        given, tensor = tensor.shape, tensor if form == "jaxdp" else our_layout(tensor)
        if tensor.shape != like.shape:
            right = like.shape if form == "jaxdp" else torch_layout(np.broadcast_to(np.float32(0), like.shape)).shape
            raise ConfigError(f"{refused}; {names[name]} has the shape {given}, and ResNet-{model.depth} has {right}")
        if name.endswith("/var") and (tensor < 0).any():
            raise ConfigError(f"{refused}; {names[name]} holds a variance below zero; give sound weights")
        tensors[name] = tensor
    if any(dtype == "F64" for dtype, _, _ in held.values()):
        remarks += ("rounded from float64 to float32",)
    params, batch_stats = (_tree(tensors, part) for part in ("params", "batch_stats"))
    return Weights(str(path), model, params, batch_stats, form, _digest(tensors), remarks)


def _digest(tensors: dict[str, np.ndarray]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.shape}\0".encode() + tensor.tobytes())
    return found.hexdigest()[:16]


def _is_pickled(data: bytes) -> bool:
    """Whether these are the bytes of what torch.save writes, a zip with a pickle inside, or of a pickle."""
    if data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return True
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


def _how_to_convert(path, refused: str) -> str:
    endings = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    others = (Path(path).with_name(f"{Path(path).stem}{ending}.safetensors") for ending in endings)
    other = next(str(one) for one in others if not one.exists())
    return (
        f"{refused}; it is pickled, and reading it could run code that is in it; where you trust it, this converts it, the "
        "weights alone or a checkpoint with its state_dict:\n"
        "  import torch; from safetensors.torch import save_file\n"
        f"  held = torch.load({str(path)!r}, weights_only=True)\n"
        f"  save_file(held.get('state_dict', held), {other!r})"
    )


def _without_prefix(held: dict) -> tuple[dict, tuple[str, ...]]:
    """(tensors without what wrappers of a network put before all names, remarks)."""
    found = PREFIX.match(min(held, default=""))
    prefix = found.group() if found else ""
    if not prefix or not all(name.startswith(prefix) for name in held):
        return held, ()
    return {name.removeprefix(prefix): one for name, one in held.items()}, (f"without the prefix {prefix!r} of all",)


def _form(held: dict, refused: str) -> str:
    for form, name in (("jaxdp", "params/conv1/kernel"), ("torchvision", "conv1.weight")):
        if name in held:
            return form
    foreign = [name for name in held if not THEIRS.fullmatch(name)] or held
    found = f"tensors such as {min(foreign)!r}" if held else "no tensor"
    raise ConfigError(
        f"{refused}; it has {found}; give a ResNet with torchvision's or timm's names ('conv1.weight', 'layer1.0.bn1.weight') "
        "or jaxdp's own ('params/conv1/kernel')"
    )


def _network(shapes: dict[str, tuple], form: str, refused: str) -> ModelConfig:
    """Depth, width, stem and classes, by names and shapes."""
    places = {found.groups() for found in map(BLOCK.match, shapes) if found}
    stages = Counter(int(stage) for stage, _ in places)
    blocks = tuple(stages[stage] for stage in sorted(stages))
    bottleneck = any(THIRD.match(name) for name in shapes)
    depth = next((n for n in DEPTHS if BLOCKS[n] == blocks and (n in BOTTLENECK_DEPTHS) == bottleneck), None)
    if depth is None:
        kind = "bottleneck" if bottleneck else "basic"
        known = ", ".join(map(str, DEPTHS))
        raise ConfigError(f"{refused}; its stages have {blocks} {kind} blocks, which no ResNet of depth {known} has")
    stem, head = ("params/conv1/kernel", "params/fc_bias") if form == "jaxdp" else ("conv1.weight", "fc.bias")
    if head not in shapes or len(shapes[head]) != 1 or not shapes[head][0]:
        raise ConfigError(f"{refused}; it has no {head!r} with one number for each class; give weights with their classifier")
    shape = shapes[stem] if form == "jaxdp" else (*shapes[stem][2:], *shapes[stem][1::-1])
    kinds = {(7, 7, 3): "imagenet", (3, 3, 3): "small"}
    if len(shape) != 4 or shape[:3] not in kinds:
        raise ConfigError(f"{refused}; {stem} has the shape {shapes[stem]}; give a network with a stem of 7x7 or 3x3 over RGB")
    return ModelConfig(depth=depth, width=shape[3], stem=kinds[shape[:3]], classes=shapes[head][0], convolution="direct")


def _expected(model: ModelConfig):
    """Shapes of the trees (params, batch_stats) of a network."""
    return jax.eval_shape(lambda: models.create(model).init(jax.random.key(0), (32, 32, 3)))


def _check_names(held: dict, wanted: set[str], model: ModelConfig, refused: str) -> None:
    for names, verb in ((wanted - held.keys(), "lacks"), (held.keys() - wanted, "has in excess of those")):
        if names:
            plural = "s" if len(names) > 1 else ""
            raise ConfigError(
                f"{refused}; it {verb} {len(names)} tensor{plural} of a ResNet-{model.depth}, {min(names)!r} first; give the "
                "file of a whole one"
            )


def _tensor(name: str, dtype: str, shape: tuple, data: bytes, refused: str) -> np.ndarray:
    """In float32, into which float16 and bfloat16 go without rounding."""
    if dtype not in READ:
        raise ConfigError(f"{refused}; {name} is {dtype}, and {', '.join(READ)} are read; convert it where it was made")
    raw = np.frombuffer(data, READ[dtype]).reshape(shape)
    with np.errstate(over="ignore"):  # what float32 cannot hold is not finite in it
        tensor = (raw.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else raw.astype(np.float32)
    if not np.isfinite(tensor).all():
        raise ConfigError(f"{refused}; {name} holds numbers that are not finite; give sound weights")
    return tensor


def named(params, batch_stats) -> dict:
    """The leaves of both trees by their paths, as params/layer1_0/conv1/kernel."""
    trees = {"params": params, "batch_stats": batch_stats}
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(trees)}


def _tree(tensors: dict[str, np.ndarray], part: str) -> dict:
    tree = {}
    for name, tensor in tensors.items():
        first, *modules, leaf = name.split("/")
        if first == part:
            place = tree
            for module in modules:
                place = place.setdefault(module, {})
            place[leaf] = tensor
    return tree


def described(model: ModelConfig) -> str:
    """What of a network its weights depend on, as JSON."""
    return json.dumps({name: getattr(model, name) for name in ("depth", "width", "stem", "classes")})


def writable(output, overwrite: bool) -> Path:
    """The path of a file of weights that may be written. Raises ConfigError where it may not."""
    if Path(output).suffix != ".safetensors":
        raise ConfigError(f"--output: {str(output)!r} is not allowed; give a file that ends in .safetensors")
    return check_output(output, overwrite)


def save(output: Path, tensors: dict[str, np.ndarray], told: dict[str, str]) -> int:
    """Write a safetensors file with metadata, whole or not at all; its bytes. Raises OSError with the file's name."""
    data = as_safetensors(tensors, told)
    write_whole(output, data)
    return len(data)


def import_file(path, output, expected: dict | None = None, overwrite: bool = False) -> dict:
    """Write a file of torchvision's or timm's as one of ours. expected: depth, classes or stem that it is to have, by name.

    Returns {"output", "tensors", "bytes", "model", "digest", "remarks"}. Raises ConfigError where the file is not what it
    should be.
    """
    output = writable(output, overwrite)
    weights = read(path)
    if weights.form == "jaxdp":
        raise ConfigError(f"FILE: {str(path)!r} is not allowed; it has jaxdp's own names already; use it as it is")
    for name, value in (expected or {}).items():
        found = getattr(weights.model, name)
        if value not in (None, found):
            raise ConfigError(f"--{name}: {value!r} is not allowed; {str(path)!r} has {found!r}; give that, or another file")
    tensors = named(weights.params, weights.batch_stats)
    told = {"model": described(weights.model), "source": Path(path).name, "source_digest": weights.digest}
    size = save(output, tensors, told)
    model, remarks = json.loads(described(weights.model)), list(weights.remarks)
    found = {"output": str(output), "tensors": len(tensors), "bytes": size, "model": model}
    return found | {"digest": weights.digest, "remarks": remarks}
