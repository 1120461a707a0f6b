"""A trained ResNet as an ONNX model, built with the package onnx (extra `onnx`); ONNX Runtime and others run it."""

import importlib.util
import json
from typing import Any, NamedTuple

import numpy as np

from jaxdp import __version__
from jaxdp.choices import kind_of_task
from jaxdp.config import Model
from jaxdp.data.augment import evaluation_indices
from jaxdp.data.datasets import pixel_stats
from jaxdp.errors import ConfigError
from jaxdp.inference.serving import IMAGES, LOGITS, PROBABILITIES, ServedModel
from jaxdp.models import weights
from jaxdp.models.batch_norm import EPSILON
from jaxdp.models.convolution import BLURS_MAXIMA, blurs_input
from jaxdp.models.resnet import BLOCKS, BOTTLENECK_DEPTHS
from jaxdp.models.torch_weights import to_torch_layout, torch_name

OPSET, IR_VERSION = 17, 8  # of 2022, which old runtimes read
BLUR = np.outer([1, 2, 1], [1, 2, 1]).astype(np.float32) / 16


class Graph:
    """Nodes of an ONNX graph in the order of their computation, and its constants. Values are named."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Append a node and return the name of its output."""
        from onnx import helper

        output = output or f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def constant(self, name: str, value: np.ndarray) -> str:
        """Store a tensor and return its name."""
        from onnx import numpy_helper

        self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name


class Map(NamedTuple):
    """A value [N, channels, side, side] of a graph."""

    name: str
    channels: int
    side: int


def check_installed() -> None:
    """Raise ConfigError if the package onnx is missing."""
    if importlib.util.find_spec("onnx") is None:
        raise ConfigError("--format", "onnx", reason="the package onnx is not installed", hint="pip install -e '.[onnx]'")


def to_onnx(served: ServedModel) -> bytes:
    """The content of a .onnx file with the input `images`, uint8 [N, H, W, 3], for every N of at least 1.

    Its outputs are `probabilities` and `logits`, float32 [N, classes] each; a registered task with its own targets has
    `logits` alone. The network must be a ResNet. The metadata are `metadata_props`, as JSON where they are not text.
    """
    from onnx import TensorProto, helper

    config, side, graph = served.config, served.side, Graph()
    named = weights.named_tensors(served.params, served.batch_stats)
    tensors = {torch_name(name): to_torch_layout(tensor) for name, tensor in named.items()}
    logits = ResNetNodes(graph, config.model, tensors).logits(_normalized(graph, served), LOGITS)
    names = [LOGITS]
    if kind := kind_of_task(config.task):
        operator, attributes = ("Sigmoid", {}) if kind == "labels" else ("Softmax", {"axis": -1})
        graph.add(operator, logits, output=PROBABILITIES, **attributes)
        names = [PROBABILITIES, LOGITS]

    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", config.model.class_count]) for name in names]
    images = helper.make_tensor_value_info(IMAGES, TensorProto.UINT8, ["N", side, side, 3])
    model = helper.make_model(
        helper.make_graph(graph.nodes, config.name, [images], outputs, [*graph.constants.values()]),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="jaxdp",
        producer_version=__version__,
    )
    helper.set_model_props(model, {name: _text(value) for name, value in served.metadata.items()})
    return model.SerializeToString(deterministic=True)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _normalized(graph: Graph, served: ServedModel) -> Map:
    """Add the preprocessing of `jaxdp.training.evaluation.evaluation_logits`: float32 [N, 3, H, W] of the images."""
    from onnx import TensorProto

    config = served.config
    x = graph.add("Cast", graph.add("Transpose", IMAGES, perm=[0, 3, 1, 2]), to=TensorProto.FLOAT)
    if served.side != config.data.evaluated_size:
        matrix = _interpolation(config.data.image_size, served.side)
        x = graph.add("MatMul", graph.constant("rows_of_crop", matrix), x)
        x = graph.add("MatMul", x, graph.constant("columns_of_crop", matrix.T))
    mean, std = (np.broadcast_to(np.asarray(stat, np.float32), 3).reshape(3, 1, 1) for stat in pixel_stats(config))
    x = graph.add("Sub", x, graph.constant("mean", mean))
    x = graph.add("Mul", x, graph.constant("inverse_std", np.float32(1) / std))
    return Map(x, 3, config.data.evaluated_size)


def _interpolation(size: int, stored: int) -> np.ndarray:
    """[size, stored] float32: the bilinear weights with which `resize_for_evaluation` computes a row from those stored."""
    distance = np.abs(np.asarray(evaluation_indices(size, stored))[:, None] - np.arange(stored))
    return np.maximum(0, 1 - distance).astype(np.float32)


def _window(size: int, stride: int, pad: int) -> dict[str, Any]:
    return {"kernel_shape": [size, size], "strides": [stride, stride], "pads": [pad] * 4}


class ResNetNodes:
    """Adds a ResNet in evaluation mode to a graph. tensors: float32, by torchvision's names, in its layouts (NCHW)."""

    def __init__(self, graph: Graph, config: Model, tensors: dict[str, np.ndarray]) -> None:
        self.graph, self.config, self.tensors = graph, config, tensors

    def logits(self, images: Map, output: str) -> str:
        """Add the nodes of the whole network; returns `output`, the name of the logits [N, classes]."""
        add, depth = self.graph.add, self.config.depth
        x = self._stem(images)
        for stage, blocks in enumerate(BLOCKS[depth], 1):
            for block in range(blocks):
                x = self._block(x, f"layer{stage}.{block}", stride=2 if stage > 1 and block == 0 else 1)
        means = add("Flatten", add("GlobalAveragePool", x.name))
        return add("Gemm", means, self._weight("fc.weight"), self._weight("fc.bias"), transB=1, output=output)

    def _weight(self, name: str) -> str:
        return self.graph.constant(name, self.tensors[name])

    def _relu(self, x: Map) -> Map:
        return x._replace(name=self.graph.add("Relu", x.name))

    def _conv(self, x: Map, name: str, stride: int = 1) -> Map:
        features, channels, size, _ = self.tensors[f"{name}.weight"].shape
        side = -(-x.side // stride)
        if blurs_input(self.config.blur_pool, channels, stride):
            x = self._blur(x, stride if size == 1 else 1)
            stride = 1 if size == 1 else stride
        parameters = (f"{name}.{leaf}" for leaf in ("weight", "bias"))
        inputs = [x.name, *(self._weight(parameter) for parameter in parameters if parameter in self.tensors)]
        return Map(self.graph.add("Conv", *inputs, **_window(size, stride, size // 2)), features, side)

    def _norm(self, x: Map, name: str) -> Map:
        parameters = (self._weight(f"{name}.{leaf}") for leaf in ("weight", "bias", "running_mean", "running_var"))
        return x._replace(name=self.graph.add("BatchNormalization", x.name, *parameters, epsilon=EPSILON))

    def _blur(self, x: Map, stride: int) -> Map:
        """See `jaxdp.models.convolution.blur`."""
        kernel = self.graph.constant(f"blur_{x.channels}", np.broadcast_to(BLUR, (x.channels, 1, 3, 3)))
        name = self.graph.add("Conv", x.name, kernel, group=x.channels, **_window(3, stride, 1))
        return Map(name, x.channels, -(-x.side // stride))

    def _stem(self, images: Map) -> Map:
        config = self.config
        if config.stem == "small":
            return self._relu(self._norm(self._conv(images, "conv1"), "bn1"))
        if config.stem == "deep":
            x = self._relu(self._norm(self._conv(images, "conv1.0", 2), "conv1.1"))
            x = self._conv(self._relu(self._norm(self._conv(x, "conv1.3"), "conv1.4")), "conv1.6")
        else:
            x = self._conv(images, "conv1", 2)
        x = self._relu(self._norm(x, "bn1"))
        stride = 1 if config.blur_pool == BLURS_MAXIMA else 2
        x = Map(self.graph.add("MaxPool", x.name, **_window(3, stride, 1)), x.channels, -(-x.side // stride))
        return x if stride == 2 else self._blur(x, 2)

    def _block(self, x: Map, name: str, stride: int) -> Map:
        """A residual block, basic or bottleneck; see `jaxdp.models.resnet.Block`."""
        strides = (1, stride, 1) if self.config.depth in BOTTLENECK_DEPTHS else (stride, 1)
        y = x
        for number, step in enumerate(strides, 1):
            y = self._norm(self._conv(y, f"{name}.conv{number}", step), f"{name}.bn{number}")
            if number < len(strides):
                y = self._relu(y)
        if f"{name}.downsample.2.weight" in self.tensors:
            x = self._average(x) if stride > 1 else x
            x = self._norm(self._conv(x, f"{name}.downsample.1"), f"{name}.downsample.2")
        elif f"{name}.downsample.0.weight" in self.tensors:
            x = self._norm(self._conv(x, f"{name}.downsample.0", stride), f"{name}.downsample.1")
        return self._relu(y._replace(name=self.graph.add("Add", y.name, x.name)))

    def _average(self, x: Map) -> Map:
        """See `jaxdp.models.convolution.average_pool`."""
        name = self.graph.add("AveragePool", x.name, ceil_mode=1, **_window(2, 2, 0))
        return Map(name, x.channels, -(-x.side // 2))
