# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl export`: a checkpoint in, a plain Hugging Face model out. Written by train/export.py."""

from __future__ import annotations

from pathlib import Path

from sparse_rl.cli.parsing import make_parser, model_dtype, parse, quiet_bars

DESCRIPTION = """Write a checkpoint as a plain Hugging Face model, for any program that reads those.

Of a run with --lora.r, the adapters are added to the base model's weights, in fp32, and rounded once; the base model
must be where the run found it. A folder that peft wrote will do too. Of any other run, the model without what resuming
needs: fp32 weights and optimiser state. The output folder must be new; a failure leaves none behind.

The text model of a multimodal checkpoint (Gemma 3, Qwen-VL) is written as the whole again. The other tensors and the
processor's files come from the model that the run started from; if that is gone, the text model is exported alone.

  sparse-rl export runs/first/checkpoint-100 exported
  sparse-rl export runs/adapters/checkpoint-100 exported --dtype float32
"""


def run(arguments: list[str]) -> None:
    parser = make_parser("export", DESCRIPTION)
    parser.add_argument("checkpoint", type=str, help="folder of a checkpoint, full or with an adapter")
    parser.add_argument("output", type=str, help="folder to write")
    parser.add_argument(
        "--dtype",
        type=str | None,
        default=None,
        help="float32, bfloat16, float16 or float64; if not given, the run's. float32 has all digits of the weights",
    )
    settings = parse(parser, arguments)
    dtype = model_dtype(settings.dtype)
    from sparse_rl.train.export import export

    quiet_bars()
    export(Path(settings.checkpoint), Path(settings.output), dtype)
    print(f"{settings.output} holds the model of {settings.checkpoint}")
