"""Alternative forms of the training step, each compiled for a GPU and compared with the current step.

    python benchmarks/gpu_leads.py [--leads NAME ...]     (needs the extra cuda13, no GPU)

Compilation gives the number of kernels and their bytes (see gpu_bytes.py). A form with the same number of both can only gain by
faster kernels, which needs a GPU to measure. The forms are patches in this script, not part of jaxdp. Writes
benchmarks/results/gpu_leads.json and prints a table.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import gpu_bytes
import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.bench.environment import provenance
from jaxdp.models import convolution, resnet

RESULT = gpu_bytes.ROOT / "benchmarks/results/gpu_leads.json"


def stem_space_to_depth():
    """The 7x7 convolution with stride 2 of 3 channels as one of 4x4 without stride of 12, padded to 16."""
    plain = resnet.convolve

    def convolve(images, kernel, stride=1, *, method="direct"):
        if kernel.shape[0] != 7:
            return plain(images, kernel, stride, method=method)
        batch, height, width, channels = images.shape
        cells = images.reshape(batch, height // 2, 2, width // 2, 2, channels).transpose(0, 1, 3, 2, 4, 5)
        cells = cells.reshape(batch, height // 2, width // 2, 4 * channels)
        taps = jnp.pad(kernel, ((1, 0), (1, 0), (0, 0), (0, 0))).reshape(4, 2, 4, 2, channels, -1).transpose(0, 2, 1, 3, 4, 5)
        taps = taps.reshape(4, 4, 4 * channels, -1)
        cells, taps = jnp.pad(cells, ((0, 0),) * 3 + ((0, 4),)), jnp.pad(taps, ((0, 0),) * 2 + ((0, 4), (0, 0)))
        return lax.conv_general_dilated(cells, taps, (1, 1), [(2, 1), (2, 1)], dimension_numbers=convolution.DIMENSIONS)

    resnet.convolve = convolve


def no_excess_precision():
    os.environ["XLA_FLAGS"] = "--xla_allow_excess_precision=false"


def unchanged():
    pass


LEADS = {
    "unchanged": unchanged,
    "stem space to depth": stem_space_to_depth,
    "no excess precision": no_excess_precision,
}
FORMS = {"separate": [], "folded": ["--model.batch-norm", "folded"]}


def measured(case: str) -> dict:
    lead, _, form = case.partition("; ")
    LEADS[lead]()
    return gpu_bytes.measured(case, FORMS[form], 256, "h200")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = [f"{lead}; {form}" for form in FORMS for lead in LEADS]
    parser.add_argument("--leads", nargs="+", default=cases, choices=cases)
    args = parser.parse_args()
    # A process for each: XLA reads its flags once, and a patch stays.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as one_by_one:
        results = list(one_by_one.map(measured, args.leads))
    record = {"provenance": provenance(), "results": results}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    for one in results:
        print(f"{one['case']:36} {one['kernels']:5} kernels {one['all_megabytes_an_image']:6.1f} MB an image")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
