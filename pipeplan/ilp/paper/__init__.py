"""The integer linear program of Beaumont, Eyraud-Dubois and Shilova (2020), equations (1)-(36).

docs/reference/paper-ilp.md lists every equation as it is built here, and what was corrected.
"""
