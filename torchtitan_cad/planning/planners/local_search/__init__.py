# SPDX-License-Identifier: BSD-3-Clause
"""Local changes of a finished plan: within the limits first, then fewer bytes."""
