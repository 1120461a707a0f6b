"""Throughput of jaxdp's loader, PyTorch's DataLoader and Grain on the same JPEGs.

    pip install -e '.[peers]' && python benchmarks/loaders.py decoders | torchvision | timm | cores [--repeats 5]

JPEGs of 400x350 pixels to random crops of 224x224, mirrored half of the time, in batches of 64 uint8 images, with one worker
per core: threads for jaxdp and Grain, whose worker processes need a program started by absl, and processes for PyTorch. Rounds
alternate; starting the workers and the first batches are excluded.

- decoders: each peer with its usual decoder (Pillow, as in torchvision's transforms) and with jaxdp's; input_vs_peers.json
- torchvision: augmentations of torchvision. jaxdp's policies, color jitter and erasing run on the device, so its loader does
  the same work with all of them; only the interpolation of the crop changes it; loader_augmentations.json
- timm: policy, crops and sampler of repeated augmentation of timm's recipes; a part of loader_augmentations.json
- cores: images for each second of processor time, of JPEGs of 500x375 and 2,000x1,500
  pixels, beside decoders of the crop alone; with `pip install nvidia-nvimgcodec-cu12 nvidia-dali-cuda120`; input_cores.json
"""

import io
import os
import statistics
import tempfile
import time
from functools import cache, partial
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
from common import alternate, arguments, made_on, markdown, read, write
from PIL import Image

from jaxdp.bench.environment import provenance
from jaxdp.bench.input import make_images
from jaxdp.config import Augment
from jaxdp.data.batch_sources import DecodedImages, default_threads
from jaxdp.data.decode import Scratch, decode
from jaxdp.data.host_crops import random_crop_box, random_numbers, random_resized_crop
from jaxdp.data.image_folder import ImageFolder
from jaxdp.data.prefetch import Prefetcher
from jaxdp.data.sampler import repeated_positions

SIZE, BATCH, FILES, WARM_UP, COUNTED = 224, 64, 256, 4, 16
SCRATCH = Scratch()
INTERPOLATIONS = ("unfiltered", "bilinear", "bicubic", "random")
STRENGTHS = (0.4, 0.4, 0.4)  # of brightness, contrast and saturation
POLICY, REPEATS = "rand-m7-mstd0.5-inc1", 3  # of timm's recipes
REPEATED = f"each image {REPEATS} times a batch"
WHOLE = "the whole, crop, resize"
FORMS = {(375, 500): 10, (1500, 2000): 2}  # height, width: batches
PACKAGES = ("jax", "numpy", "simplejpeg", "opencv-python-headless", "pillow", "torch")


def encoded(data, position):
    return data


class Images:
    """The files over and over, as (transform(bytes, position), label)."""

    def __init__(self, folder, transform=encoded, batches=WARM_UP + COUNTED):
        self.source, self.transform, self.batches = ImageFolder.open(folder), transform, batches

    def __len__(self):
        return BATCH * self.batches

    def __getitem__(self, index):
        data, label = self.source[int(index) % len(self.source)]
        return self.transform(data, index), label


def by_jaxdp(folder, interpolation="unfiltered", repeats=1, batches=WARM_UP + COUNTED):
    ranges = Augment(crop_interpolation=interpolation)

    def crop(pixels, out, position):
        random_resized_crop(pixels, out, ranges=ranges, random=random_numbers(0, position))

    loader = DecodedImages(ImageFolder.open(folder), transform=crop, size=SIZE, target=2, threads=default_threads())
    positions = np.arange(BATCH * batches).reshape(-1, BATCH)

    def load(positions):
        ids = repeated_positions(np.arange(BATCH), first=positions[0], global_batch=BATCH, repeats=repeats)
        return loader.batch(ids % len(loader), positions)

    ahead = Prefetcher(load, positions)
    while (batch := ahead.next()) is not None:
        yield batch
    ahead.close()


def by_torch(folder, transform, repeated=False):
    """repeated: with timm's sampler of repeated augmentation."""
    from torch.utils.data import DataLoader

    data, order = Images(folder, transform), {"shuffle": True}
    if repeated:
        from timm.data.distributed_sampler import RepeatAugSampler

        order = {"sampler": RepeatAugSampler(data, num_replicas=1, rank=0, num_repeats=REPEATS)}
    return iter(DataLoader(data, BATCH, num_workers=default_threads(), **order))


def by_grain(folder, transform, batches=WARM_UP + COUNTED):
    import grain

    data = grain.MapDataset.source(Images(folder, batches=batches)).seed(0).shuffle()
    data = data.map_with_index(lambda index, item: {"image": transform(item[0], index), "label": item[1]}).batch(BATCH)
    return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=default_threads(), prefetch_buffer_size=4)))


def by_dali(folder, batches):
    """On the CPU, with DALI's usual fused decoder of random crops."""
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=BATCH, num_threads=default_threads(), device_id=None, exec_async=False, exec_pipelined=False)
    def crops():
        images = fn.decoders.image_random_crop(fn.readers.file(file_root=str(folder), random_shuffle=True)[0])
        return fn.flip(fn.resize(images, size=(SIZE, SIZE), antialias=False), horizontal=fn.random.coin_flip())

    pipeline = crops()
    return (pipeline.run() for _ in range(batches))


def one_by_one(folder, transform, batches):
    data = Images(folder, transform, batches)
    return ([data[n] for n in range(first, first + BATCH)] for first in range(0, len(data), BATCH))


@cache
def codec():
    """(nvImageCodec, its decoder on the CPU, with the upsampling of chroma that other decoders have, its parameters)."""
    from nvidia import nvimgcodec

    kinds = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]
    device = {"device_id": nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY, "max_num_cpu_threads": 1}
    decoder = nvimgcodec.Decoder(**device, backends=kinds, options=":fancy_upsampling=1")
    return nvimgcodec, decoder, nvimgcodec.DecodeParams(color_spec=nvimgcodec.ColorSpec.SRGB)


def decoded_region(data: bytes, top: int, left: int, height: int, width: int) -> np.ndarray:
    """A rectangle of an image: the entropy decoding of all rows down to it, the rest of the decoding in it alone."""
    nvimgcodec, decoder, parameters = codec()
    region = nvimgcodec.Region(top, left, top + height, left + width)
    return np.asarray(decoder.decode(nvimgcodec.CodeStream(data).get_sub_code_stream(region=region), params=parameters).cpu())


def drawn(data: bytes, position: int):
    """(height and width of an image, box of its random crop)."""
    height, width = simplejpeg.decode_jpeg_header(data)[:2]
    return height, width, random_crop_box(height, width, min_area=Augment().min_area, random=random_numbers(0, position))


def region_alone(data: bytes, position: int) -> np.ndarray:
    *_, box = drawn(data, position)
    return cv2.resize(decoded_region(data, *box), (SIZE, SIZE))


def check_regions(folder) -> None:
    """That regions have the pixels of the whole, bit for bit."""
    files = Images(folder)
    for position in range(8):
        data, _ = files[position]
        *_, (top, left, height, width) = drawn(data, position)
        expected = decode(data)[top : top + height, left : left + width]
        np.testing.assert_array_equal(decoded_region(data, top, left, height, width), expected)


def last_row(data: bytes, position: int) -> np.ndarray:
    height, width, _ = drawn(data, position)
    return decoded_region(data, height - 1, 0, 1, width)


def whole(data: bytes, position: int) -> np.ndarray:
    *_, (top, left, height, width) = drawn(data, position)
    return cv2.resize(decode(data, SCRATCH)[top : top + height, left : left + width], (SIZE, SIZE))


def reduced(data: bytes, position: int) -> np.ndarray:
    """All of the image at 1/2, 1/4 or 1/8 of its size, where the crop keeps SIZE pixels: not the pixels of the whole."""
    height, width, box = drawn(data, position)
    divisor = max(divisor for divisor in (1, 2, 4, 8) if divisor == 1 or min(box[2:]) >= divisor * SIZE)
    height, width = -(-height // divisor), -(-width // divisor)
    buffer = SCRATCH.array(height, width)
    pixels = simplejpeg.decode_jpeg(data, colorspace="RGB", min_height=height, min_width=width, buffer=buffer)
    top, left, height, width = (number // divisor for number in box)
    return cv2.resize(pixels[top : top + height, left : left + width], (SIZE, SIZE))


def ours(data: bytes, position: int) -> np.ndarray:
    out = np.empty((SIZE, SIZE, 3), np.uint8)
    random_resized_crop(decode(data, SCRATCH), out, ranges=Augment(), random=random_numbers(0, position))
    return out


def usual_pillow(data: bytes, position: int) -> np.ndarray:
    """Decoding, crop and resize by Pillow, as in torchvision's transforms."""
    random = random_numbers(0, position)
    with Image.open(io.BytesIO(data)) as image:
        image = image.convert("RGB")
        top, left, height, width = random_crop_box(image.height, image.width, min_area=0.08, random=random)
        box = (left, top, left + width, top + height)
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
        return np.asarray(image if random[0] < 0.5 else image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))


def operations() -> dict:
    """Name -> torchvision's operation on a crop."""
    from torchvision import transforms

    return {
        "RandAugment": transforms.RandAugment(),
        "TrivialAugmentWide": transforms.TrivialAugmentWide(),
        "ColorJitter": transforms.ColorJitter(*STRENGTHS),
        "ColorJitter with hue": transforms.ColorJitter(*STRENGTHS, 0.1),
    }


def torchvision_transform(data, position, *, name):
    from torchvision import transforms

    steps = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
    steps += [operations()[name]] if name in operations() else []
    steps += [transforms.PILToTensor()]
    steps += [transforms.RandomErasing(p=1.0)] if name == "RandomErasing" else []
    with Image.open(io.BytesIO(data)) as image:
        return transforms.Compose(steps)(image.convert("RGB"))


@cache  # for each worker
def timm_steps(policy):
    """timm's transforms of an image of its recipes: a policy, or "" for none."""
    from timm.data.auto_augment import rand_augment_transform
    from timm.data.transforms import RandomResizedCropAndInterpolation
    from torchvision import transforms

    steps = [RandomResizedCropAndInterpolation(SIZE, interpolation="random"), transforms.RandomHorizontalFlip()]
    fields = {"translate_const": int(0.45 * SIZE), "img_mean": (124, 116, 104)}
    steps += [rand_augment_transform(policy, fields)] if policy else []
    return transforms.Compose([*steps, transforms.PILToTensor()])


def timm_transform(data, position, *, policy):
    with Image.open(io.BytesIO(data)) as image:
        return timm_steps(policy)(image.convert("RGB"))


def decoders(folder) -> dict:
    """Name -> function that returns batches."""
    return {
        "jaxdp": partial(by_jaxdp, folder),
        "PyTorch DataLoader, Pillow": partial(by_torch, folder, usual_pillow),
        "PyTorch DataLoader, our decoder": partial(by_torch, folder, ours),
        "Grain threads, Pillow": partial(by_grain, folder, usual_pillow),
        "Grain threads, our decoder": partial(by_grain, folder, ours),
    }


def of_cores(folder, batches) -> dict:
    peers = {
        "jaxdp": partial(by_jaxdp, folder, batches=batches),
        "Grain threads, our decoder": partial(by_grain, folder, ours, batches),
        "DALI on the CPU": partial(by_dali, folder, batches),
    }
    return peers | {name: partial(one_by_one, folder, transform, batches) for name, transform in ALONE.items()}


ALONE = {  # one image after the other
    WHOLE: whole,
    "the region of the crop alone (nvImageCodec), resize": region_alone,
    "the whole at 1/2, 1/4 or 1/8 where the crop has the pixels, crop, resize": reduced,
    "the last row alone: little but entropy decoding": last_row,
}


def of_torchvision(folder) -> dict:
    peers = ("crop and flip", *operations(), "RandomErasing")
    return {
        **{f"jaxdp, {name} crops": partial(by_jaxdp, folder, name) for name in INTERPOLATIONS},
        **{f"torchvision, {name}": partial(by_torch, folder, partial(torchvision_transform, name=name)) for name in peers},
    }


def of_timm(folder) -> dict:
    plain, policy = (partial(timm_transform, policy=policy) for policy in ("", POLICY))
    return {
        "jaxdp, random crops": partial(by_jaxdp, folder, "random"),
        f"jaxdp, random crops, {REPEATED}": partial(by_jaxdp, folder, "random", REPEATS),
        "timm, random crops": partial(by_torch, folder, plain),
        f"timm, random crops, {POLICY}": partial(by_torch, folder, policy),
        f"timm, random crops, {POLICY}, {REPEATED}": partial(by_torch, folder, policy, repeated=True),
    }


def rate(batches) -> float:
    """Images a second from the end of the warm-up on."""
    for _ in range(WARM_UP):
        next(batches)
    began = time.perf_counter()
    for _ in range(COUNTED):
        next(batches)
    return BATCH * COUNTED / (time.perf_counter() - began)


def rate_of_a_core(batches, images: int) -> float:
    """Images for each second of processor time of this process, over all batches, which are so many images."""
    began = time.process_time()
    for _ in batches:
        pass
    return images / (time.process_time() - began)


def rounds_of(contenders: dict, rounds: int, measured=rate) -> dict:
    """The rates of alternating rounds, by contender, and their medians. contenders: name -> function that returns batches."""
    rates = alternate({name: lambda make=make: measured(make()) for name, make in contenders.items()}, rounds)
    return {"rates": rates, "medians": {name: statistics.median(values) for name, values in rates.items()}}


def main():
    studies = {"decoders": (decoders, ["grain"]), "torchvision": (of_torchvision, ["torchvision"])}
    studies["timm"] = of_timm, ["torchvision", "timm"]
    studies["cores"] = of_cores, ["grain", "nvidia-nvimgcodec-cu12", "nvidia-dali-cuda120"]
    given = arguments(__doc__, study=studies, repeats=5)
    import torch

    torch.set_num_threads(1)
    contenders, packages = studies[given.study]
    record = {
        "provenance": provenance([*PACKAGES, *packages]),
        "workers": default_threads(),
        "load_average": os.getloadavg()[1],
    }
    if given.study == "cores":
        write("input_cores", record | {"forms": [cores(*form, given.repeats) for form in FORMS.items()]}, cores_table)
        return
    with tempfile.TemporaryDirectory() as made:
        record["file_bytes"] = make_images(Path(made), FILES)
        record |= rounds_of(contenders(Path(made)), given.repeats)
    if given.study == "decoders":
        write("input_vs_peers", record, decoders_table)
    else:
        before = read("loader_augmentations", {})
        write("loader_augmentations", before | ({"timm": record} if given.study == "timm" else record))


def cores(sides: tuple[int, int], batches: int, repeats: int) -> dict:
    """The rates of a core with images of these sides."""
    height, width = sides
    with tempfile.TemporaryDirectory() as made:
        size = make_images(Path(made), BATCH, height=height, width=width)
        check_regions(Path(made))
        measured = partial(rate_of_a_core, images=BATCH * batches)
        rounds = rounds_of(of_cores(Path(made), batches), repeats, measured)
    return {"height": height, "width": width, "file_bytes": size} | rounds


def decoders_table(record: dict) -> str:
    medians, versions = record["medians"], record["provenance"]["versions"]
    rows = [
        (name, f"{rate:,.0f}", f"{rate / record['workers']:,.0f}", f"{medians['jaxdp'] / rate:.2f} x")
        for name, rate in medians.items()
    ]
    return markdown(
        ("loader", "images/s", "per core", "speed of jaxdp"),
        rows,
        f"Medians of {len(record['rates']['jaxdp'])} alternating rounds with {record['workers']} workers, by "
        f"`benchmarks/loaders.py` on {made_on(record)}, PyTorch {versions['torch']}, Grain {versions['grain']}.",
    )


def cores_table(record: dict) -> str:
    versions, forms = record["provenance"]["versions"], record["forms"]
    rows = []
    for name in forms[0]["medians"]:
        cells = [name]
        for form in forms:
            rate, base = (form["medians"][which] for which in (name, WHOLE if name in ALONE else "jaxdp"))
            cells += [f"{rate:,.0f}", f"{rate / base:.2f} x"]
        rows.append(cells)
    heads = [head for form in forms for head in (f"{form['width']:,}x{form['height']:,}, images/s", "")]
    sizes = " and ".join(f"{form['file_bytes'] / 1e3:,.0f}" for form in forms)
    small, rate = f"{forms[0]['width']}x{forms[0]['height']}", forms[0]["medians"]["jaxdp"]
    return markdown(
        ("a core", *heads),
        rows,
        f"Medians of {len(forms[0]['rates']['jaxdp'])} alternating rounds by `benchmarks/loaders.py` on {made_on(record)}, "
        f"Grain {versions['grain']}, DALI {versions['nvidia-dali-cuda120']}, nvImageCodec "
        f"{versions['nvidia-nvimgcodec-cu12']}; JPEGs of {sizes} KB.",
        f"10,000 images/s of {small} need {10_000 / rate:.0f} such cores. The 64 cores of a host with 8 for each of its 8 GPUs "
        f"decode {64 * rate:,.0f}; 10,000 for each GPU need {80_000 / rate:.0f} cores.",
    )


def augmentations_table(record: dict) -> str:
    rates, timm = record["medians"], record["timm"]
    host, plain = rates["jaxdp, unfiltered crops"], rates["torchvision, crop and flip"]
    names = {name: name.partition(", ")[2] for name in rates if name.startswith("torchvision")}
    names["torchvision, crop and flip"] = "nothing else"
    rows = [(shown, f"{rates[name]:,.0f}", f"{host:,.0f}", f"{host / rates[name]:.1f} x") for name, shown in names.items()]
    for name in INTERPOLATIONS[1:]:
        rate = rates[f"jaxdp, {name} crops"]
        peer = (f"{plain:,.0f}", f"{rate:,.0f}", f"{rate / plain:.1f} x") if name == "bilinear" else ("", f"{rate:,.0f}", "")
        rows.append((f"{name} antialiased crops", *peer))
    second, rates = [], timm["medians"]
    for name, rate in rates.items():
        maker, _, what = name.partition(", random crops")
        if maker == "timm":
            host = rates["jaxdp, random crops" + what.replace(f", {POLICY}", "")]
            second.append((what.removeprefix(", ") or "nothing else", f"{rate:,.0f}", f"{host:,.0f}", f"{host / rate:.1f} x"))
    versions = record["provenance"]["versions"] | timm["provenance"]["versions"]
    return markdown(
        ("random crops and flips, and", "torchvision, images/s", "jaxdp, images/s", ""),
        rows,
        markdown(("crops with a random filter and flips, and", "timm, images/s", "jaxdp, images/s", ""), second),
        f"Medians of {len(next(iter(record['rates'].values())))} alternating rounds with {record['workers']} workers, by "
        f"`benchmarks/loaders.py` on {made_on(record)}, torchvision {versions['torchvision']} in PyTorch's DataLoader; other "
        f"programs used the cores, too. The second table, with timm {versions['timm']}, is of another run, at a load average "
        f"of {timm['load_average']:.0f}: compare rates within a table only.",
    )


if __name__ == "__main__":
    main()
