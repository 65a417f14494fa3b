"""Attacks on the multiplexer, its shell and the splice."""

from tests.attacks.attack import Attack

ATTACKS: tuple[Attack, ...] = (
    Attack(
        name="mux-unbounded-send-queue",
        file="localai_dist/net/feed.py",
        old="        if queued > HIGH_WATER and self.producer",
        new="        if False and self.producer",
        reddens=(
            "tests.net.test_stalls.StalledReaderTests.test_both_directions",
            "tests.net.test_stalls.StalledReaderTests.test_across_a_relay",
            "tests.net.test_stream.MuxStreamSuite.test_stopped_reader_stops_writer",
        ),
        leaves_green=("tests.net.test_stream.MuxStreamSuite.test_order",),
    ),
    Attack(
        name="mux-transport-filled-without-limit",
        file="localai_dist/mux/sender.py",
        old="        room = self.limit.limit - held\n",
        new="        room = 1 << 40\n",
        reddens=("tests.net.test_session.TransferTests.test_transport_is_never_overfilled",),
        leaves_green=("tests.net.test_stream.MuxStreamSuite.test_order",),
    ),
    Attack(
        name="mux-window-update-never-sent",
        file="localai_dist/mux/session.py",
        old="        while self._owed:\n",
        new="        while False:\n",
        reddens=(
            "tests.mux.test_windows.MixedWindowsTests.test_every_pairing",
            "tests.net.test_stream.MuxStreamSuite.test_clean_close_flushes",
        ),
        leaves_green=("tests.net.test_stream.MuxStreamSuite.test_order",),
    ),
    Attack(
        name="mux-credit-used-before-announced",
        file="localai_dist/mux/window.py",
        old="            self.owed += grown\n",
        new="            self.allowed += grown\n",
        reddens=(
            "tests.mux.test_windows.WindowTests.test_using_growth_before_it_was_told",
            "tests.mux.test_window.ReceiveWindowTests.test_growth_is_told_first",
        ),
        leaves_green=("tests.net.test_stream.MuxStreamSuite.test_order",),
    ),
    Attack(
        name="mux-ping-never-times-out",
        file="localai_dist/net/session.py",
        old="        if silent >= self.config.keepalive_timeout:\n",
        new="        if False:\n",
        reddens=(
            "tests.net.test_endings.EveryEndingTests.test_keepalive",
            "tests.net.test_links.KeepaliveTests.test_a_way_that_swallows_everything",
            "tests.net.test_links.KeepaliveTests.test_one_way_only",
        ),
        leaves_green=("tests.net.test_endings.EveryEndingTests.test_connection",),
    ),
    Attack(
        name="mux-classes-ignored",
        file="localai_dist/mux/sender.py",
        old="            stream.ready_in = stream.traffic\n",
        new="            stream.ready_in = TrafficClass.INFERENCE\n",
        reddens=(
            "tests.net.test_links.SlowLinkTests.test_requests_beside_a_transfer",
            "tests.mux.test_session.ClassOrderTests.test_urgent_goes_first",
        ),
        leaves_green=("tests.net.test_stream.MuxStreamSuite.test_order",),
    ),
    Attack(
        name="mux-delay-cap-off",
        file="localai_dist/mux/pacing.py",
        old="        return self.under_way < self.cap\n",
        new="        return True\n",
        reddens=(
            "tests.net.test_links.SlowLinkTests.test_requests_beside_a_transfer",
            "tests.mux.test_session.ClassOrderTests.test_delay_cap",
        ),
        leaves_green=("tests.mux.test_session.ClassOrderTests.test_urgent_goes_first",),
    ),
    Attack(
        name="mux-wrapped-reset-taken-as-clean",
        file="localai_dist/net/splice.py",
        old="        return not error.remote\n",
        new="        return True\n",
        reddens=(
            "tests.net.test_splice.EveryEndingTests.test_failures",
            "tests.net.test_splice.EndingsTests.test_session_death_is_judged_first",
        ),
        leaves_green=("tests.net.test_splice.EveryEndingTests.test_clean_endings",),
    ),
    Attack(
        name="mux-generic-endings-checked-first",
        file="localai_dist/net/splice.py",
        old="    if isinstance(error, SessionDead):\n",
        new="    if isinstance(error, ConnectionDone | ConnectionAborted):\n        return True\n"
        "    if isinstance(error, SessionDead):\n",
        reddens=("tests.net.test_splice.EndingsTests.test_session_death_is_judged_first",),
        leaves_green=("tests.net.test_splice.EndingsTests.test_which_endings_are_clean",),
    ),
    Attack(
        name="mux-splice-returns-after-the-first-direction",
        file="localai_dist/net/splice.py",
        old="        if left.lost and right.lost and not done.called:\n",
        new="        if not done.called:\n",
        reddens=(
            "tests.net.test_splice.EveryEndingTests.test_clean_endings",
            "tests.net.test_splice.SpliceTests.test_over_only_after_the_second_end",
        ),
        leaves_green=("tests.net.test_splice.SpliceTests.test_far_side_speaks_first",),
    ),
    Attack(
        name="mux-session-bound-removed",
        file="localai_dist/mux/window.py",
        old="        taken = min(wanted, self.free)\n",
        new="        taken = wanted\n",
        reddens=(
            "tests.mux.test_windows.WindowTests.test_a_thousand_unread_streams",
            "tests.net.test_session.ManyUnreadTests.test_unread_bound",
        ),
        leaves_green=("tests.net.test_stream.MuxStreamSuite.test_order",),
    ),
    Attack(
        name="mux-stream-bound-removed",
        file="localai_dist/mux/receiver.py",
        old=" or self.opened_there >= self.limits.max_streams",
        new="",
        reddens=("tests.mux.test_rules.AcceptTests.test_the_1001st_does_no_harm",),
        leaves_green=("tests.mux.test_rules.AcceptTests.test_ack_on_accept",),
    ),
    Attack(
        name="mux-death-taken-as-a-clean-end",
        file="localai_dist/net/session.py",
        old="            stream.session_ended(reason)\n",
        new="            stream._end_cleanly()\n",
        reddens=(
            "tests.net.test_endings.EveryEndingTests.test_connection",
            "tests.net.test_stream.MuxStreamTests.test_session_death_is_no_clean_end",
        ),
        leaves_green=("tests.net.test_stream.MuxStreamSuite.test_clean_close_flushes",),
    ),
    Attack(
        name="mux-an-answered-ping-settles-nothing",
        file="localai_dist/mux/pacing.py",
        old="        self.under_way = self._total - total\n",
        new="",
        reddens=("tests.mux.test_pacing.DelayCapTests.test_a_larger_window_is_not_taken_for_arrival",),
        leaves_green=("tests.mux.test_pacing.DelayCapTests.test_unknown_pong_is_ignored",),
    ),
    Attack(
        name="mux-go-away-drops-what-open-streams-get",
        file="localai_dist/mux/receiver.py",
        old="        if stream is not None and stream.state is not State.RESET:\n",
        new="        if stream is not None and stream.state is not State.RESET and self.go_away_sent is None:\n",
        reddens=("tests.mux.test_two_sessions.TwoSessionsTests.test_random_schedule",),
        leaves_green=("tests.net.test_stream.MuxStreamSuite.test_order",),
    ),
    Attack(
        name="mux-a-frontend-starts-without-the-masker",
        file="localai_dist/cli/frontend.py",
        old="        require_masker()  #",
        new="        #",
        reddens=("tests.net.test_websocket.MaskerTests.test_missing",),
        leaves_green=("tests.net.test_websocket.MaskerTests.test_present",),
    ),
    Attack(
        name="mux-splice-ends-a-side-that-is-over",
        file="localai_dist/net/splice.py",
        old="        if self.lost:\n            return\n",
        new="",
        reddens=(
            "tests.net.test_splice.EveryEndingTests.test_clean_endings",
            "tests.net.test_splice.EveryEndingTests.test_the_other_way_round",
        ),
        leaves_green=("tests.net.test_splice.EndingsTests",),
    ),
)
