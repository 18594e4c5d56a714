"""The tests, a package so that helpers and the plugin ``tests.ci_skips`` are imported by their full names."""
