"""ResNet v1.5 in torchvision's layout, independent of jaxdp: tensor shapes, NumPy float64 evaluation, torch module."""

import numpy as np
from safetensors.numpy import save_file

EXPANSION = {False: 1, True: 4}  # block output channels / inner channels, by whether the block is a bottleneck


def tensor_shapes(blocks, bottleneck, width=64, classes=1000, stem=7, form_d=False) -> dict[str, tuple]:
    """Name -> shape of every tensor. blocks: number of blocks in each stage; stem: kernel size of the first convolution.

    form_d: of timm's resnet50d.
    """
    shapes = {} if form_d else {"conv1.weight": (width, 3, stem, stem)}

    def add_batch_norm(name, channels):
        shapes.update({f"{name}.{leaf}": (channels,) for leaf in ("weight", "bias", "running_mean", "running_var")})

    if form_d:
        half = width // 2
        for place, channels in ((0, (half, 3)), (3, (half, half)), (6, (width, half))):
            shapes[f"conv1.{place}.weight"] = (*channels, 3, 3)
        add_batch_norm("conv1.1", half)
        add_batch_norm("conv1.4", half)
    add_batch_norm("bn1", width)
    in_channels = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        out_channels = inner * EXPANSION[bottleneck]
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            convolutions = [(in_channels, out_channels, 3), (out_channels, out_channels, 3)]
            if bottleneck:
                convolutions = [(in_channels, inner, 1), (inner, inner, 3), (inner, out_channels, 1)]
            for number, (c_in, c_out, size) in enumerate(convolutions, 1):
                shapes[f"{name}.conv{number}.weight"] = (c_out, c_in, size, size)
                add_batch_norm(f"{name}.bn{number}", c_out)
            if block == 0 and (stage or in_channels != out_channels):
                shapes[f"{name}.downsample.{int(form_d)}.weight"] = (out_channels, in_channels, 1, 1)
                add_batch_norm(f"{name}.downsample.{1 + form_d}", out_channels)
            in_channels = out_channels
    return shapes | {"fc.weight": (classes, in_channels), "fc.bias": (classes,)}


def random_tensors(seed: int, *network, **sizes) -> dict[str, np.ndarray]:
    """Random weights and statistics, none of them 0 or 1 so that every tensor matters; logits are of order 1 at any depth."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, shape in tensor_shapes(*network, **sizes).items():
        if name.endswith("running_var"):
            value = rng.uniform(0.5, 2.0, shape)
        elif len(shape) > 1:
            value = rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:]))
        else:
            value = rng.normal(size=shape) * 0.2 + (0.5 if name.endswith("weight") else 0.0)
        tensors[name] = value.astype(np.float32)
    return tensors


def logits(tensors: dict, images, small_stem=False, blur_pool="none") -> np.ndarray:
    """Logits [B, classes] float64 of images [B, 3, H, W], in evaluation mode. blur_pool: as in `jaxdp.config.Model`."""
    tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}

    def blur(x, stride=1):
        x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))[:, :, ::stride, ::stride]
        return (windows * np.outer([1, 2, 1], [1, 2, 1]) / 16).sum((-1, -2))

    def conv(x, name, stride=1):
        kernel = tensors[f"{name}.weight"]
        size = kernel.shape[2]
        if blur_pool in ("convolutions", "convolutions_and_pool") and stride > 1 and x.shape[1] >= 16:
            x = blur(x)
        x = np.pad(x, ((0, 0), (0, 0), (size // 2,) * 2, (size // 2,) * 2))
        windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (2, 3))[:, :, ::stride, ::stride]
        return np.einsum("bchwij,ocij->bohw", windows, kernel)

    def batch_norm(x, name):
        leaves = ("weight", "bias", "running_mean", "running_var")
        weight, bias, mean, var = (tensors[f"{name}.{leaf}"][:, None, None] for leaf in leaves)
        return (x - mean) / np.sqrt(var + 1e-5) * weight + bias

    def relu(x):
        return np.maximum(x, 0)

    def average(x, stride):
        """Means of 2x2 pixels, without those that do not exist."""
        if stride == 1:
            return x
        padded = np.pad(x, ((0, 0), (0, 0), (0, x.shape[2] % 2), (0, x.shape[3] % 2)), constant_values=np.nan)
        return np.nanmean(np.lib.stride_tricks.sliding_window_view(padded, (2, 2), (2, 3))[:, :, ::2, ::2], axis=(-1, -2))

    x = np.asarray(images, np.float64)
    if "conv1.0.weight" in tensors:
        x = relu(batch_norm(conv(x, "conv1.0", 2), "conv1.1"))
        x = conv(relu(batch_norm(conv(x, "conv1.3"), "conv1.4")), "conv1.6")
    else:
        x = conv(x, "conv1", 1 if small_stem else 2)
    x = relu(batch_norm(x, "bn1"))
    if not small_stem:
        x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
        maxima = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3)).max((-1, -2))
        x = blur(maxima, 2) if blur_pool == "convolutions_and_pool" else maxima[:, :, ::2, ::2]
    blocks = {tuple(map(int, name[5:].split(".")[:2])) for name in tensors if name.startswith("layer")}
    for stage, block in sorted(blocks):
        name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
        if f"{name}.conv3.weight" in tensors:  # v1.5: the stride is on the 3x3 convolution
            y = relu(batch_norm(conv(x, f"{name}.conv1"), f"{name}.bn1"))
            y = relu(batch_norm(conv(y, f"{name}.conv2", stride), f"{name}.bn2"))
            y = batch_norm(conv(y, f"{name}.conv3"), f"{name}.bn3")
        else:
            y = relu(batch_norm(conv(x, f"{name}.conv1", stride), f"{name}.bn1"))
            y = batch_norm(conv(y, f"{name}.conv2"), f"{name}.bn2")
        if f"{name}.downsample.2.weight" in tensors:
            x = batch_norm(conv(average(x, stride), f"{name}.downsample.1"), f"{name}.downsample.2")
        elif f"{name}.downsample.0.weight" in tensors:
            x = batch_norm(conv(x, f"{name}.downsample.0", stride), f"{name}.downsample.1")
        x = relu(x + y)
    return x.mean((2, 3)) @ tensors["fc.weight"].T + tensors["fc.bias"]


def torch_network(blocks, bottleneck, width=64, classes=1000, stem=7):
    """ResNet v1.5 as a torch.nn.Module with torchvision's names. stem: 7, or 3 of stride 1 without pooling (small images)."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self, in_channels, inner, stride):
            super().__init__()
            out_channels = inner * EXPANSION[bottleneck]
            if bottleneck:
                convolutions = [(in_channels, inner, 1, 1), (inner, inner, 3, stride), (inner, out_channels, 1, 1)]
            else:
                convolutions = [(in_channels, inner, 3, stride), (inner, inner, 3, 1)]
            self.count = len(convolutions)
            for number, (c_in, c_out, size, step) in enumerate(convolutions, 1):
                setattr(self, f"conv{number}", nn.Conv2d(c_in, c_out, size, step, size // 2, bias=False))
                setattr(self, f"bn{number}", nn.BatchNorm2d(c_out))
            self.downsample = None
            if stride != 1 or in_channels != out_channels:
                convolution = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
                self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(out_channels))

        def forward(self, x):
            y = x
            for number in range(1, self.count + 1):
                y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
                y = y.relu() if number < self.count else y
            return (y + (x if self.downsample is None else self.downsample(x))).relu()

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(3, width, stem, 2 if stem == 7 else 1, stem // 2, bias=False)
            self.bn1 = nn.BatchNorm2d(width)
            self.maxpool = nn.MaxPool2d(3, 2, 1) if stem == 7 else nn.Identity()
            in_channels = width
            for stage, count in enumerate(blocks):
                inner, stage_blocks = width * 2**stage, []
                for block in range(count):
                    stage_blocks.append(Block(in_channels, inner, 2 if stage and not block else 1))
                    in_channels = inner * EXPANSION[bottleneck]
                setattr(self, f"layer{stage + 1}", nn.Sequential(*stage_blocks))
            self.fc = nn.Linear(in_channels, classes)

        def forward(self, x):
            x = self.maxpool(self.bn1(self.conv1(x)).relu())
            for stage in range(1, 5):
                x = getattr(self, f"layer{stage}")(x)
            return self.fc(x.mean((2, 3)))

    return Network()


def write_tiny_weights(path, classes=6, seed=1):
    """Write weights of the network of `tiny_resnet` in torchvision's layout. Returns the path and the tensors."""
    tensors = random_tensors(seed, (1, 1), False, width=4, classes=classes, stem=3)
    save_file(tensors, path)
    return str(path), tensors
