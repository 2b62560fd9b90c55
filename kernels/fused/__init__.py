"""The Triton kernels, one file per op. Imported only when a kernel is about to run: everything else works without
Triton.

Every kernel runs in Triton's interpreter too (``TRITON_INTERPRET=1`` before the import); what the interpreter cannot
do, or does otherwise, is behind the constant ``PTX``.
"""
