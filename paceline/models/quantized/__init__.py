"""Quantized weights of Hugging Face folders: AWQ, GPTQ, FP8 and compressed-tensors.

`config.py` reads and checks `quantization_config`; a file per format unpacks its tensors into the one form of
`linear.py`; `weights.py` puts the result in the place of plain weights, so that nothing else knows the formats.
"""
