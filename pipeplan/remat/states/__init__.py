"""OffMate: parameters, gradients, optimizer states and activations of one device on its host.

X. Zhao's thesis, chapter 4; docs/reference/offmate.md says what is as printed.
"""
