# SPDX-License-Identifier: BSD-3-Clause
"""Attention servers that join a running job: processes that hold no tokens and may come, go and fail at any time.

``registry`` is the part of a key-value store in which servers announce themselves and ranks strike them off,
``wire`` the messages between a rank and a server, ``client`` the rank's side and ``server`` the server's.
"""
