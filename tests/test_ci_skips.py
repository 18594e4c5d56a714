"""What the plugin does with tests that a machine can't run."""

from __future__ import annotations

import pytest

from tests.ci_skips import find_program

pytest_plugins = ["pytester"]

SUITE = """
    import pytest

    @pytest.mark.system("sh")
    def test_with_its_program(): pass

    @pytest.mark.system("no-such-program")
    def test_without_its_program(): raise AssertionError

    @pytest.mark.xfail
    def test_expected_to_fail(): raise AssertionError
"""


def run(pytester, monkeypatch, *, ci):
    monkeypatch.setenv("CI", ci)
    return pytester.runpytest_inprocess("-rs", "-p", "tests.ci_skips", "-p", "no:cacheprovider")


@pytest.mark.parametrize("ci", ["", "false"])
def test_a_missing_program_skips_and_is_named(pytester, monkeypatch, ci):
    pytester.makepyfile(SUITE)
    result = run(pytester, monkeypatch, ci=ci)
    result.assert_outcomes(passed=1, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines("*needs the program no-such-program")


def test_on_the_build_server_a_skip_is_a_failure(pytester, monkeypatch):
    pytester.makepyfile(SUITE)
    result = run(pytester, monkeypatch, ci="true")
    result.assert_outcomes(passed=1, errors=1, xfailed=1)


def test_on_the_build_server_a_skipped_module_is_a_failure(pytester, monkeypatch):
    pytester.makepyfile("import pytest\npytest.importorskip('no_such_module')")
    run(pytester, monkeypatch, ci="true").assert_outcomes(errors=1)


def test_programs_off_the_path_are_found_where_debian_keeps_them(tmp_path, monkeypatch):
    program = tmp_path / "16" / "bin" / "no-such-server"
    program.parent.mkdir(parents=True)
    program.touch()
    monkeypatch.setattr("tests.ci_skips._PROGRAM_FOLDERS", f"{tmp_path}/*/bin")
    assert find_program("no-such-server") == str(program)
    assert find_program("no-such-program") is None
