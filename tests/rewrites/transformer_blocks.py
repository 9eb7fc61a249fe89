"""Blocks of real transformers with random weights, as coremltools converts them, beside PyTorch's own outputs."""

from __future__ import annotations

from functools import cache, partial

import coremltools as ct
import numpy as np
import pytest

import mil_ane_passes as ane
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.runtime import Runtime
from mil_ane_passes.torch_frontend.patching import patched

BLOCKS = ("GPT-2", "Llama", "Qwen2", "Mistral", "BERT", "ViT", "CLIP", "Whisper")


def _last_row(output):
    return output.logits[:, -1]


@cache
def make_architecture(name, blocks=2):
    """Make the architecture `name`: of a language model the logits of the last token, else what a head returns."""
    pytest.importorskip("transformers")
    from tests.lab.models import zoo

    sizes = {**zoo.SMALL_CONFIG, "num_hidden_layers": blocks}
    text = {**sizes, "vocab_size": zoo.VOCABULARY}
    causal = {"attention_mask": zoo._make_attention_mask(zoo.TOKENS, causal=True), "use_cache": False}
    ids, image = zoo.IDS_INPUT, zoo.make_image_input(64)
    grouped = partial(zoo.make_from_transformers, call={**causal, "pick": _last_row}, num_key_value_heads=2, **text)
    makers = {
        "GPT-2": lambda: (zoo.make_from_transformers(
            "GPT2LMHeadModel", "GPT2Config", n_embd=192, n_layer=blocks, n_head=4, vocab_size=zoo.VOCABULARY,
            call={**causal, "pick": _last_row}), ids),
        "Llama": lambda: (grouped("LlamaForCausalLM", "LlamaConfig"), ids),
        "Qwen2": lambda: (grouped("Qwen2ForCausalLM", "Qwen2Config"), ids),
        "Mistral": lambda: (grouped("MistralForCausalLM", "MistralConfig"), ids),
        "BERT": lambda: (zoo.make_from_transformers(
            "BertForSequenceClassification", "BertConfig", **text,
            call={"attention_mask": zoo._make_attention_mask(zoo.TOKENS, causal=False),
                  "pick": lambda output: output.logits}), ids),
        "ViT": lambda: (zoo.make_from_transformers(
            "ViTForImageClassification", "ViTConfig", image_size=64, **sizes,
            call={"pick": lambda output: output.logits}), image),
        "CLIP": lambda: (zoo.make_from_transformers(
            "CLIPVisionModelWithProjection", "CLIPVisionConfig", image_size=64, patch_size=16, **sizes,
            call={"pick": lambda output: output.image_embeds}), image),
        "Whisper": lambda: (zoo.make_from_transformers(
            "WhisperForConditionalGeneration", "WhisperConfig", d_model=192, encoder_layers=1, decoder_layers=blocks,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=384, decoder_ffn_dim=384,
            max_source_positions=20, vocab_size=zoo.VOCABULARY, pad_token_id=0,
            call={"names": ("input_features", "decoder_input_ids"), "use_cache": False, "pick": _last_row,
                  "decoder_attention_mask": zoo._make_attention_mask(16, causal=True)}),
            {"inputs": ((1, 80, 40), (1, 16)), "ids": zoo.VOCABULARY}),
    }
    make, inputs = makers[name]()
    return zoo.Architecture(name, "language", "transformers", make, **inputs)


def convert_block(module, inputs, path, *, precision="FLOAT32", target="iOS17", shapes=None):
    """The program of the package that coremltools makes of the traced `module`; `shapes` are flexible ones."""
    import torch

    with torch.no_grad():
        traced = torch.jit.trace(module.eval(), inputs, check_trace=False)
    declared = [
        ct.TensorType(f"x{at}", shape=(shapes or [x.shape for x in inputs])[at],
                      dtype=np.float32 if x.is_floating_point() else np.int32) for at, x in enumerate(inputs)]
    with patched():
        made = ct.convert(traced, inputs=declared, convert_to="mlprogram", skip_model_load=True,
                          compute_precision=getattr(ct.precision, precision),
                          minimum_deployment_target=getattr(ct.target, target))
    made.save(str(path))
    return ane.load(path).program


def convert_real_block(name, path, **settings):
    """(program, feeds, PyTorch's output in double precision) of the architecture `name`."""
    import torch

    architecture = make_architecture(name)
    module, inputs = architecture.model(), architecture.draw(0)
    program = convert_block(module, inputs, path, **settings)
    with torch.no_grad():
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        expected = module.double()(*wide).numpy()
    return program, {f"x{at}": x.numpy() for at, x in enumerate(inputs)}, expected


def run_at(program, feeds, precision):
    """The only output of a program at one precision."""
    (result,) = Runtime(clone_program(program), precision=precision)(feeds).values()
    return result


def list_shapes(program, *types):
    """The shapes of the results of ops of `types`."""
    from mil_ane_passes.ir.query import iterate_ops

    return [tuple(op.outputs[0].shape) for _, op in iterate_ops(program) if op.op_type in types]
