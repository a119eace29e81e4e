"""Build the inspector page as one file with a recording inside, which needs no server and no network.

Browsers do not load modules from files, so the page's modules are joined into one script. The file's policy allows that script and
style by their hashes, and nothing else. Knows the page's files and no model.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORTED = re.compile(r"^export (?:async )?(?:function\*?|class|const) (\w+)", re.MULTILINE)
_LEFT_OVER = re.compile(r"^\s*(import|export)\b.*", re.MULTILINE)
_LINKED = '<link rel="stylesheet" href="/page/style.css">\n'
_STARTED = '<script type="module" src="/page/main.js"></script>\n'
_ICON = '<link rel="icon" href="/page/icon.svg" type="image/svg+xml">\n'


def join_modules(folder: Path = PAGE, entry: str = "main") -> str:
    """Join modules into one script: each becomes a function, after the modules that it imports."""
    order: dict[str, str] = {}

    def add(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"modules import each other: {' -> '.join((*above, name))}")
        if name in order:
            return
        text = (folder / f"{name}.js").read_text(encoding="utf-8")
        for found in _IMPORT.finditer(text):
            add(found[2], (*above, name))
        exported = ", ".join(_EXPORTED.findall(text))
        body = _IMPORT.sub(lambda found: f"const {{{found[1]}}} = {_called(found[2])};\n", text)
        body = re.sub(r"^export (?=(?:async )?(?:function|class|const)\b)", "", body, flags=re.MULTILINE)
        left = _LEFT_OVER.search(body)
        if left is not None:
            raise ValueError(f"{name}.js: {left[0]!r} cannot be joined; write `import {{...}} from` or export a declaration")
        order[name] = f"const {_called(name)} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"

    add(entry, ())
    return f'"use strict";\n{"".join(order.values())}'


def _called(name: str) -> str:
    return f"module_{name}"


def build_viewer(recording: Mapping[str, Any]) -> str:
    """The page with this recording inside, as HTML."""
    script, style = join_modules(), (PAGE / "style.css").read_text(encoding="utf-8")
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    allowed = f"script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    # A recording holds text of models, which must not close its element.
    data = json.dumps(recording, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        _ICON: '<link rel="icon" href="data:,">\n',
        _LINKED: f"<style>{style}</style>\n",
        _STARTED: "",
        '<meta charset="utf-8">\n': f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
        "</body>": f'<script type="application/json" id="recording">{data}</script>\n<script>{script}</script>\n</body>',
    }
    if "</script" in script.lower() or "</style" in style.lower():
        raise ValueError("the page's own script or style would close its element")
    for part, instead in parts.items():
        if page.count(part) != 1:
            raise ValueError(f"index.html: {part.strip()!r} occurs {page.count(part)} times; it must occur once")
        page = page.replace(part, instead)
    return page


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
