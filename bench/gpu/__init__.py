# SPDX-License-Identifier: BSD-3-Clause
"""A verdict on a machine with one GPU: tests, speeds and goals, each part in its own process (CONTRIBUTING.md)."""
