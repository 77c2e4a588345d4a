# SPDX-License-Identifier: BSD-3-Clause
"""Attention servers that join a running job: processes that hold no tokens and may come, go and fail at any time.

``registry`` is the part of a key-value store in which servers announce themselves and ranks strike them off,
``wire`` and ``request`` the messages between a rank and a server, and ``client`` the rank's side. The server's is in
``tools.attention_server``, as no rank imports it.
"""
