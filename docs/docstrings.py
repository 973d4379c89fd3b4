"""The docstrings' Markdown as reStructuredText: tables, code, lists of arguments."""

import re

_FENCE = re.compile(r"(\s*)```(\w*)\s*$")
_ROW = re.compile(r"(\s*)\|(.*)\|\s*$")
# Sphinx reads "num_experts: E." as the item "E." of a list.
_LETTER = re.compile(r"^(\s*|\s+[\w*, ]+: )([A-Za-z]\.)(?=\s|$)")
# Stars of arguments that share a description.
_STARS = re.compile(r"(?<=, )\*\*(?=[\w, *]+: )")
_REFERENCE = re.compile(r"\s*References?: ")
_NAMES = re.compile(r"\s+\w+(, \w+)*,$")


def restructured(lines: list[str]) -> list[str]:
    """Returns the lines of a docstring with Markdown's blocks in Sphinx's form.

    Args:
        lines: lines of a docstring in Google's style.
    """
    result, number = [], 0
    while number < len(lines):
        line = lines[number]
        if fence := _FENCE.match(line):
            end = next(
                i for i in range(number + 1, len(lines)) if _FENCE.match(lines[i])
            )
            indent = fence.group(1)
            result += ["", f"{indent}.. code-block:: {fence.group(2) or 'text'}", ""]
            result += [f"   {x}" if x.strip() else "" for x in lines[number + 1 : end]]
            result.append("")
            number = end + 1
        elif _ROW.match(line):
            end = number
            while end < len(lines) and _ROW.match(lines[end]):
                end += 1
            result += _list_table(lines[number:end])
            number = end
        elif _NAMES.match(line) and number + 1 < len(lines):
            # Names of arguments that share a description go over several lines.
            lines = [*lines[:number], f"{line} {lines[number + 1].strip()}"] + (
                lines[number + 2 :]
            )
            if not _NAMES.match(lines[number]):
                result.append(lines[number])
                number += 1
        elif _REFERENCE.match(line):
            # The lines that follow are indented, which is another block in Sphinx.
            end = number + 1
            while end < len(lines) and lines[end].strip():
                end += 1
            result.append(
                " ".join([line, *(x.strip() for x in lines[number + 1 : end])])
            )
            number = end
        else:
            line = _STARS.sub(r"\*\*", line)
            result.append(_LETTER.sub(r"\1\\\2", line))
            number += 1
    return result


def _list_table(rows):
    indent = _ROW.match(rows[0]).group(1)
    cells = [[x.strip() for x in _ROW.match(row).group(2).split("|")] for row in rows]
    lines = ["", f"{indent}.. list-table::", f"{indent}   :header-rows: 1", ""]
    # The second row is the rule below the heads.
    for row in cells[:1] + cells[2:]:
        for number, cell in enumerate(row):
            bullet = "  -" if number else "* -"
            lines.append(f"{indent}   {bullet} {cell}".rstrip())
    return [*lines, ""]
