"""A trained ResNet as an ONNX model, built with the package onnx (extra `onnx`); ONNX Runtime and others run it."""

import importlib.util
import json
from typing import Any

import numpy as np

from jaxdp import __version__
from jaxdp.data.augment import evaluation_indices
from jaxdp.data.datasets import pixel_stats
from jaxdp.errors import ConfigError
from jaxdp.inference.serving import IMAGES, LOGITS, PROBABILITIES, ServedModel
from jaxdp.models import weights
from jaxdp.models.onnx_resnet import Graph, Map, ResNetNodes
from jaxdp.models.torch_weights import to_torch_layout, torch_name

OPSET, IR_VERSION = 17, 8  # of 2022, which old runtimes read


def check_installed() -> None:
    """Raise ConfigError if the package onnx is missing."""
    if importlib.util.find_spec("onnx") is None:
        raise ConfigError("--format", "onnx", reason="the package onnx is not installed", hint="pip install -e '.[onnx]'")


def to_onnx(served: ServedModel) -> bytes:
    """The content of a .onnx file with the input `images`, uint8 [N, H, W, 3], for every N of at least 1.

    Its outputs are `probabilities` and `logits`, float32 [N, classes] each. The network must be a ResNet. The metadata are
    `metadata_props`, as JSON where they are not text.
    """
    from onnx import TensorProto, helper

    config, side, graph = served.config, served.side, Graph()
    named = weights.named_tensors(served.params, served.batch_stats)
    tensors = {torch_name(name): to_torch_layout(tensor) for name, tensor in named.items()}
    logits = ResNetNodes(graph, config.model, tensors).logits(_normalized(graph, served), LOGITS)
    graph.add("Softmax", logits, axis=-1, output=PROBABILITIES)

    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", config.model.class_count])
        for name in (PROBABILITIES, LOGITS)
    ]
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
