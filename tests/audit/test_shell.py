"""Shell text as commands: quotes, substitutions, here-documents, wrappers; and text that no shell would take."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrein.audit.commands import Piece, script_pieces
from longrein.audit.shell import parse


def words(script: str) -> list[list[str]]:
    return [command.words for command in parse(script)]


def pieces(script: str, place: str = "command") -> list[str]:
    return [piece.text for piece in script_pieces(script) if piece.place == place]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("a b; c && d || e | f & g", [["a", "b"], ["c"], ["d"], ["e"], ["f"], ["g"]]),
        ("a 'b c' \"d $e\" f\\ g", [["a", "b c", "d $e", "f g"]]),
        ("c'ur'l w\\get \"x\"y", [["curl", "wget", "xy"]]),
        ("$'\\x63url' $'a\\nb' $'\\143'", [["curl", "a\nb", "c"]]),
        ("a # b; c\nd", [["a"], ["d"]]),
        ("a#b 'c#d'", [["a#b", "c#d"]]),
        ("a \\\n b", [["a", "b"]]),
        ("x=$(a b) c", [["a", "b"], ["x=$(a b)", "c"]]),
        ('a "$(b "$(c)")"', [["c"], ["b", "$(c)"], ["a", '$(b "$(c)")']]),
        ("a `b \\`c\\``", [["c"], ["b", "`c`"], ["a", "`b \\`c\\``"]]),
        ("(a; b) | { c; }", [["a"], ["b"], ["c"]]),
        ("f() { a; }; f", [["a"], ["f"]]),
        ("if a; then b; else c; fi", [["a"], ["b"], ["c"]]),
        ("for x in 1 2; do a $x; done", [["for", "x", "in", "1", "2"], ["a", "$x"]]),
        ("while ! a; do b; done", [["a"], ["b"]]),
        ("a=(curl wget) b", [["a=", "b"]]),
        ("a $((1 << 2)) b", [["a", "$((1 << 2))", "b"]]),
        ("diff <(a) <(b)", [["a"], ["b"], ["diff", "<(…)", "<(…)"]]),
    ],
)
def test_words(script: str, expected: list[list[str]]) -> None:
    assert words(script) == expected


def test_redirections_and_here_documents() -> None:
    first, second = parse("cat <<'A' > f 2>&1 <<-B\n$(x)\nA\n\tone\n\tB\nd 2>/dev/null >>'g h' <<< 'i j'\n")
    assert first.words == ["cat"]
    assert first.redirects == [(">", "f"), (">&", "1")]
    assert first.document == "$(x)one"
    assert second.redirects == [(">", "/dev/null"), (">>", "g h")]
    assert second.document == "i j\n"


def test_an_unquoted_here_document_runs_its_substitutions() -> None:
    assert words('cat <<E\nsays "$(curl x)"\nE\n') == [["curl", "x"], ["cat"]] or words(
        'cat <<E\nsays "$(curl x)"\nE\n'
    ) == [["cat"], ["curl", "x"]]
    assert words("cat <<'E'\n$(curl x)\nE\n") == [["cat"]]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("sudo -u root env A=1 timeout -k 5 10 nice -n 3 curl x", "curl x"),
        ("find . -exec sh -c 'curl x' \\;", "curl x"),
        ("echo a | xargs -I {} -n 1 curl {}", "curl {}"),
        ("bash -lc 'eval \"curl x\"'", "curl x"),
        ("bash -s <<< 'curl x'", "curl x"),
        ("git -C d -c a.b=c --no-pager log -p", "git log -p"),
        ("git -c core.fsmonitor='./x y' status", "git config core.fsmonitor './x y'"),
        ("PATH=/tmp:$PATH /usr/bin/make all", "export PATH=/tmp:$PATH"),
        ("PATH=/tmp:$PATH /usr/bin/make all", "make all"),
        ("cat a > 'b' 2>> c", "cat a > b >> c"),
    ],
)
def test_what_commands_start(script: str, expected: str) -> None:
    assert expected in pieces(script)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("rm -rf a b", ["delete a", "delete b"]),
        ("mv a b", ["delete a", "write b"]),
        ("cp -r a b c/", ["read a", "read b", "write c/"]),
        ("ln -sf /x/y z", ["link z -> /x/y"]),
        ("ln -s /x/y", ["link y -> /x/y"]),
        ("sed -i 's/a/b/' c d", ["write c", "write d"]),
        ("echo a | tee -a b", ["write b"]),
        ("a > b 2>/dev/null < c", ["write b", "read c"]),
        ("git rm -f a", ["delete a"]),
        ("git apply <<'E'\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\nE", ["write x"]),
        ("apply_patch <<'E'\n*** Begin Patch\n*** Delete File: a\n*** Update File: b\n*** Move to: c\n+d\nE", ["delete a", "write b", "write c"]),
        ("find a -name '*.py' -delete", ["delete a -name *.py"]),
    ],
)  # fmt: skip
def test_what_commands_do_to_files(script: str, expected: list[str]) -> None:
    assert pieces(script, "file") == expected


def test_contents_and_programs() -> None:
    found = list(script_pieces("cat > a.py <<'E'\nx = 1\nE\nprintf 'a\\nb' > c\npython3 - <<'E'\ny\nE\nnode -e 'z'"))
    assert Piece("content", "x = 1", "a.py") in found
    assert Piece("content", "a\nb", "c") in found
    assert [piece.text for piece in found if piece.place == "code"] == ["y", "z"]


@given(st.lists(st.text(min_size=1), min_size=1, max_size=6))
@settings(deadline=None)
def test_quoted_words_come_back_as_they_were(given_words: list[str]) -> None:
    given_words = [word.replace("\r", "").replace("\0", "") or "x" for word in given_words]
    (command,) = parse("run " + " ".join(map(shlex.quote, given_words)))
    assert command.words == ["run", *given_words]


@given(st.text(alphabet="ab \n\t'\"\\$`(){}<>;&|#=-EOF\x0b\u00a0", max_size=200))
@settings(deadline=None, max_examples=500)
def test_any_text_is_read_to_its_end(script: str) -> None:
    list(script_pieces(script))


@given(st.text(alphabet="ab '\"\\$`(){}<>;&|", max_size=60))
@settings(deadline=None, max_examples=300)
def test_a_command_on_a_line_of_its_own_is_found_before_any_text(script: str) -> None:
    assert "curl x" in pieces("curl x\n" + script)


@pytest.mark.parametrize(
    "unit", ["$(", "`", "((", "<<E\n", "'", '"', "bash -c '", "$((", 'eval "', "a=(", "<(", "${", "\\", "x|", "{ "]
)
def test_deeply_nested_and_unbalanced_text_is_no_trouble(unit: str) -> None:
    list(script_pieces(unit * 100_000))
