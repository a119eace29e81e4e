"""The rows of the paper's tables that an evaluation can be held against."""

from sinkdlm.errors import EvalError

# In per cent. The paper does not say whether values are acc or acc_norm, how many examples the prompts had, or which version of
# LAMBADA it is.
_TABLES = """
row               arc_easy  arc_challenge  hellaswag   piqa   race  social_iqa  lambada_openai  gsm8k
table1:0.5b:dlm      44.70          27.13      35.21  55.28  31.29       40.28           44.09  46.92
table1:0.5b:sink     55.47          32.17      48.91  63.44  33.79       37.82           45.24  49.20
table1:0.5b:ga       47.85          29.27      41.95  61.92  34.07       36.08           45.10  47.01
table1:1.5b:dlm      65.49          41.47      59.50  66.49  37.80       36.18           66.58  57.77
table1:1.5b:sink     68.18          43.43      61.31  68.17  37.61       39.97           66.41  58.45
table1:1.5b:ga       53.03          32.27      52.90  60.33  37.42       38.26           51.10  52.35
table2:0.5b:dlm      32.20          25.09      31.56  54.08  31.77       35.98           29.26  34.95
table2:0.5b:sink     40.91          22.35      40.43  62.24  32.73       37.92           47.16  35.17
table2:0.5b:ga       36.28          23.46      37.61  57.07  33.68       34.44           42.27  36.39

row             arc_easy  arc_challenge   race  hellaswag   piqa
table3:front       55.47          32.17  33.79      48.91  63.44
table3:end         56.14          32.51  31.77      48.16  64.31
table4:0           44.70          27.13  31.29      35.21  55.28
table4:1           55.47          32.17  33.79      48.91  63.44
table4:2           54.76          32.42  32.89      48.94  63.66
table4:4           55.39          31.47  33.06      48.45  62.62
table5:learned     55.47          32.17  33.79      48.91  63.44
table5:zero        55.68          32.94  32.87      48.81  64.09
"""
_ROWS: dict[str, dict[str, str]] = {}
for _table in _TABLES.split("\n\n"):
    _head, *_lines = (line.split() for line in _table.strip().splitlines())
    _ROWS |= {line[0]: dict(zip(_head[1:], line[1:], strict=True)) for line in _lines}
PAPER_ROWS = tuple(_ROWS)


def paper_row(name: str) -> dict[str, float]:
    """Task -> the paper's value, as a share, in the order of the paper's columns."""
    if name not in _ROWS:
        raise EvalError(f"--paper {name}: no such row; there are {', '.join(_ROWS)}")
    return {task: round(float(value) / 100, 6) for task, value in _ROWS[name].items()}
