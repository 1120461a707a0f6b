"""ResNet v1.5 as torchvision lays it out, written anew: the list of its tensors, and its evaluation in NumPy, in float64."""

import numpy as np

EXPANSION = {False: 1, True: 4}  # of a block's channels, by whether it is a bottleneck


def tensors(blocks, bottleneck, width=64, classes=1000, stem=7) -> dict[str, tuple]:
    """Name -> shape of every tensor of a network with so many blocks in each stage."""
    shapes = {"conv1.weight": (width, 3, stem, stem)}

    def norm(name, channels):
        shapes.update({f"{name}.{leaf}": (channels,) for leaf in ("weight", "bias", "running_mean", "running_var")})

    norm("bn1", width)
    before = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        after = inner * EXPANSION[bottleneck]
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            plan = [(before, after, 3), (after, after, 3)]
            if bottleneck:
                plan = [(before, inner, 1), (inner, inner, 3), (inner, after, 1)]
            for number, (into, out, size) in enumerate(plan, 1):
                shapes[f"{name}.conv{number}.weight"] = (out, into, size, size)
                norm(f"{name}.bn{number}", out)
            if block == 0 and (stage or before != after):
                shapes[f"{name}.downsample.0.weight"] = (after, before, 1, 1)
                norm(f"{name}.downsample.1", after)
            before = after
    return shapes | {"fc.weight": (classes, before), "fc.bias": (classes,)}


def random_tensors(seed: int, *network, **sizes) -> dict[str, np.ndarray]:
    """Random weights and random statistics, none of them a unit that could hide a mistake; logits of about 1 at any depth."""
    draw, found = np.random.default_rng(seed), {}
    for name, shape in tensors(*network, **sizes).items():
        if name.endswith("running_var"):
            value = draw.uniform(0.5, 2.0, shape)
        elif len(shape) > 1:
            value = draw.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:]))
        else:
            value = draw.normal(size=shape) * 0.2 + (0.5 if name.endswith("weight") else 0.0)
        found[name] = value.astype(np.float32)
    return found


def logits(held: dict, images, small_stem=False) -> np.ndarray:
    """images: [B, 3, H, W]. Returns [B, classes] float64."""
    held = {name: np.asarray(value, np.float64) for name, value in held.items()}

    def convolved(x, name, stride=1):
        kernel = held[f"{name}.weight"]
        size = kernel.shape[2]
        x = np.pad(x, ((0, 0), (0, 0), (size // 2,) * 2, (size // 2,) * 2))
        windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (2, 3))[:, :, ::stride, ::stride]
        return np.einsum("bchwij,ocij->bohw", windows, kernel)

    def normalised(x, name):
        of = {leaf: held[f"{name}.{leaf}"][:, None, None] for leaf in ("weight", "bias", "running_mean", "running_var")}
        return (x - of["running_mean"]) / np.sqrt(of["running_var"] + 1e-5) * of["weight"] + of["bias"]

    def relu(x):
        return np.maximum(x, 0)

    x = relu(normalised(convolved(np.asarray(images, np.float64), "conv1", 1 if small_stem else 2), "bn1"))
    if not small_stem:
        x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
        x = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))[:, :, ::2, ::2].max((-1, -2))
    names = {tuple(map(int, name[5:].split(".")[:2])) for name in held if name.startswith("layer")}
    for stage, block in sorted(names):
        name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
        if f"{name}.conv3.weight" in held:  # v1.5: the stride is on the 3x3 convolution
            y = relu(normalised(convolved(x, f"{name}.conv1"), f"{name}.bn1"))
            y = relu(normalised(convolved(y, f"{name}.conv2", stride), f"{name}.bn2"))
            y = normalised(convolved(y, f"{name}.conv3"), f"{name}.bn3")
        else:
            y = relu(normalised(convolved(x, f"{name}.conv1", stride), f"{name}.bn1"))
            y = normalised(convolved(y, f"{name}.conv2"), f"{name}.bn2")
        if f"{name}.downsample.0.weight" in held:
            x = normalised(convolved(x, f"{name}.downsample.0", stride), f"{name}.downsample.1")
        x = relu(x + y)
    return x.mean((2, 3)) @ held["fc.weight"].T + held["fc.bias"]


def torch_network(blocks, bottleneck):
    """ResNet v1.5 in torch.nn with torchvision's names."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self, before, inner, stride):
            super().__init__()
            after = inner * (4 if bottleneck else 1)
            if bottleneck:
                plan = [(before, inner, 1, 1), (inner, inner, 3, stride), (inner, after, 1, 1)]
            else:
                plan = [(before, inner, 3, stride), (inner, inner, 3, 1)]
            self.count = len(plan)
            for number, (into, out, size, step) in enumerate(plan, 1):
                setattr(self, f"conv{number}", nn.Conv2d(into, out, size, step, size // 2, bias=False))
                setattr(self, f"bn{number}", nn.BatchNorm2d(out))
            self.downsample = None
            if stride != 1 or before != after:
                self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

        def forward(self, x):
            y = x
            for number in range(1, self.count + 1):
                y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
                y = y.relu() if number < self.count else y
            return (y + (x if self.downsample is None else self.downsample(x))).relu()

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
            self.maxpool = nn.MaxPool2d(3, 2, 1)
            before = 64
            for stage, count in enumerate(blocks):
                inner, made = 64 * 2**stage, []
                for block in range(count):
                    made.append(Block(before, inner, 2 if stage and not block else 1))
                    before = inner * (4 if bottleneck else 1)
                setattr(self, f"layer{stage + 1}", nn.Sequential(*made))
            self.fc = nn.Linear(before, 1000)

        def forward(self, x):
            x = self.maxpool(self.bn1(self.conv1(x)).relu())
            for stage in range(1, 5):
                x = getattr(self, f"layer{stage}")(x)
            return self.fc(x.mean((2, 3)))

    return Network()
