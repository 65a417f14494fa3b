"""Flags over environment over YAML over defaults."""

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.errors import UserMistake
from localai_dist.settings.agent import AgentSettings
from localai_dist.settings.frontend import FrontendSettings
from localai_dist.settings.kinds import HostPort
from localai_dist.settings.option import options_of
from localai_dist.settings.resolve import Resolved, resolve
from localai_dist.settings.worker import WorkerSettings

DATABASE = {"LOCALAI_AUTH_DATABASE_URL": "postgresql://u:hunter2@db/localai"}
SAMPLES = {
    "text": "seven",
    "path": "/srv/seven",
    "switch": "true",
    "number": "7",
    "port": "30007",
    "duration": "7s",
    "host:port": ":20007",
    "size": "7MiB",
    "list, comma-separated": "six,seven",
    "URLs, comma-separated": "http://seven:7",
    "key=value, comma-separated": "seven=7",
    "share or size": "77%",
    "size (a bare number is MiB)": "7",
    "`bound` or `loose`": "loose",
    "auth_database_url": "postgresql:///seven",
}
"""A value of each kind that is no option's default."""

ALL = (FrontendSettings, WorkerSettings, AgentSettings)


def no_file(path: str) -> str:
    """A disk without any file."""
    raise FileNotFoundError(2, "No such file or directory", path)


def frontend(
    flags: dict[str, str] | None = None, environ: dict[str, str] | None = None, yaml: str | None = None, **more: Any
) -> Resolved[FrontendSettings]:
    """A frontend's settings with a database given."""
    more.setdefault("read_file", no_file)
    return resolve(FrontendSettings, flags or {}, {**DATABASE, **(environ or {})}, yaml, **more)


def worker(**environ: str) -> WorkerSettings:
    """A worker's settings from its environment, with a frontend given."""
    return resolve(WorkerSettings, {}, {"LOCALAI_REGISTER_TO": "http://f:8080", **environ}, read_file=no_file).settings


class PrecedenceTests(SynchronousTestCase):
    """Who wins."""

    def test_flag_environment_yaml_default(self) -> None:
        """A flag wins over the environment, that over the YAML file, that over the default."""
        yaml = "route_wait: 1s"
        self.assertEqual(frontend({"route-wait": "3s"}, {"LOCALAI_ROUTE_WAIT": "2s"}, yaml).settings.route_wait, 3)
        self.assertEqual(frontend({}, {"LOCALAI_ROUTE_WAIT": "2s"}, yaml).settings.route_wait, 2)
        self.assertEqual(frontend({}, {}, yaml).settings.route_wait, 1)
        self.assertEqual(frontend().settings.route_wait, 5)

    def test_empty_variable_is_not_given(self) -> None:
        """An empty variable counts as not set, so a unit file may name it without a value."""
        self.assertEqual(frontend({}, {"LOCALAI_ROUTE_WAIT": ""}, "route-wait: 1s").settings.route_wait, 1)

    def test_zero_means_the_default_where_zero_cannot_be(self) -> None:
        """A reconnect grace of 0 is the default grace, and of 1 ms is 1 ms."""
        self.assertEqual(frontend({}, {"LOCALAI_WORKER_RECONNECT_GRACE": "0"}).settings.worker_reconnect_grace, 90)
        self.assertEqual(frontend({}, {"LOCALAI_WORKER_RECONNECT_GRACE": "1ms"}).settings.worker_reconnect_grace, 0.001)
        self.assertEqual(frontend({}, {"LOCALAI_MODEL_LOAD_WAIT": "0"}).settings.model_load_wait, 0)

    def test_every_option_can_be_set_in_every_way(self) -> None:
        """Every option of every daemon is read from its flag, its variable and its YAML key alike."""
        needed = {**DATABASE, "LOCALAI_REGISTER_TO": "http://f:1", "LOCALAI_REGISTRATION_TOKEN": "t"}
        for settings_type in ALL:
            for row in options_of(settings_type):
                text = SAMPLES.get(row.name) or SAMPLES[row.kind.name]
                base = {key: value for key, value in needed.items() if key != row.env}
                for flags, environ, yaml in (
                    ({row.flag: text}, {}, None),
                    ({}, {row.env: text}, None),
                    ({}, {}, f"{row.key}: '{text}'"),
                ):
                    got = resolve(settings_type, flags, {**base, **environ}, yaml, read_file=no_file, cwd="/")
                    self.assertEqual(getattr(got.settings, row.name), row.kind.parse(text), row.name)
                    if row.name != "worker_tunnel":
                        self.assertNotEqual(getattr(got.settings, row.name), row.default, row.name)

    def test_defaults_are_the_documented_ones(self) -> None:
        """The numbers of the design hold when nobody says anything."""
        settings = frontend().settings
        self.assertEqual(settings.address, HostPort("", 8080))
        self.assertEqual((settings.instance_live_window, settings.tunnel_keepalive), (30, 5))
        self.assertEqual(
            (settings.health_interval, settings.node_stale_after, settings.load_orphan_after), (15, 60, 60)
        )
        self.assertEqual((settings.lame_duck, settings.drain_timeout), (5, 30))
        self.assertEqual(settings.nats_backend_install_timeout, 900)
        self.assertIsNone(settings.nats_model_load_timeout)
        self.assertEqual(worker().heartbeat_interval, 10)
        self.assertEqual((worker().base_port, worker().http_port), (20000, 19999))


class YamlTests(SynchronousTestCase):
    """The configuration file."""

    def test_values_of_any_yaml_type(self) -> None:
        """Numbers, truth values, lists and mappings of YAML mean what their text means elsewhere."""
        text = "register_to: [http://a:1, http://b:2]\nnode-labels: {zone: x, gpu: 1}\ngrpc_max_port: 30000\n"
        settings = resolve(WorkerSettings, {}, {}, text, read_file=no_file).settings
        self.assertEqual(settings.register_to, ("http://a:1", "http://b:2"))
        self.assertEqual(settings.node_labels, {"zone": "x", "gpu": "1"})
        self.assertEqual(settings.grpc_max_port, 30000)
        self.assertIs(frontend(yaml="auto_approve_nodes: yes").settings.auto_approve_nodes, True)

    def test_unknown_key_names_the_nearest(self) -> None:
        """A key nobody knows is an error that names the nearest known one."""
        error = self.assertRaises(UserMistake, frontend, yaml="rout_wait: 1s")
        self.assertIn("'rout_wait'", str(error))
        self.assertIn("did you mean 'route_wait'", str(error))

    def test_same_key_twice(self) -> None:
        """The same option in two spellings is an error, not a lottery."""
        self.assertRaises(UserMistake, frontend, yaml="route_wait: 1s\nroute-wait: 2s")

    def test_broken_yaml_names_the_place_and_not_the_line(self) -> None:
        """A file that is no YAML is refused by line and column; the line itself may hold a secret (WALK-23)."""
        error = self.assertRaises(UserMistake, frontend, yaml="api_key: 'hunter2\n")
        self.assertIn("line", str(error))
        self.assertNotIn("hunter2", str(error))
        self.assertRaises(UserMistake, frontend, yaml="- a\n- b\n")

    def test_empty_file(self) -> None:
        """An empty file says nothing."""
        self.assertEqual(frontend(yaml="").settings.route_wait, 5)


class SecretTests(SynchronousTestCase):
    """Values nobody may see."""

    def test_from_a_file(self) -> None:
        """A secret is read from the file its _FILE variable or YAML key names, without the line end."""
        got = frontend({}, {"LOCALAI_REGISTRATION_TOKEN_FILE": "/run/t"}, read_file=lambda path: f"in {path}\n")
        self.assertEqual(got.settings.registration_token, "in /run/t")
        got = frontend({}, {}, "api_key_file: /run/k", read_file=lambda path: "a,b\n")
        self.assertEqual(got.settings.api_key, ("a", "b"))

    def test_unreadable_file(self) -> None:
        """A secret's file that can't be read or is empty stops the start: it must not mean 'no secret'."""
        environ = {"LOCALAI_REGISTRATION_TOKEN_FILE": "/run/t"}
        self.assertIn("/run/t", str(self.assertRaises(UserMistake, frontend, {}, environ)))
        self.assertRaises(UserMistake, frontend, {}, environ, read_file=lambda path: " \n")

    def test_old_flag_is_taken_with_a_warning(self) -> None:
        """--registration-token still works and says in the log what to use, without the value (WALK-23)."""
        got = frontend({"registration-token": "hunter2"})
        self.assertEqual(got.settings.registration_token, "hunter2")
        self.assertEqual(len(got.warnings), 1)
        self.assertIn("LOCALAI_REGISTRATION_TOKEN", got.warnings[0])
        self.assertNotIn("hunter2", got.warnings[0])

    def test_repr_and_errors_hold_no_secret(self) -> None:
        """Neither the settings' text nor a refusal shows a secret (WALK-23)."""
        got = frontend({}, {"LOCALAI_REGISTRATION_TOKEN": "hunter3", "LOCALAI_API_KEY": "hunter4"})
        self.assertNotIn("hunter", repr(got))
        error = self.assertRaises(UserMistake, frontend, {}, {"LOCALAI_AUTH_DATABASE_URL": "mysql://u:hunter2@h/x"})
        self.assertIn("LOCALAI_AUTH_DATABASE_URL", str(error))
        self.assertNotIn("hunter", str(error))
        error = self.assertRaises(UserMistake, frontend, {}, {"LOCALAI_REGISTRATION_TOKEN": "hunter\n2"})
        self.assertNotIn("hunter", str(error))

    def test_every_secret_is_marked(self) -> None:
        """Whatever is called a token, a key or a database address is a secret (WALK-23)."""
        for settings_type in ALL:
            for row in options_of(settings_type):
                self.assertEqual(row.secret, row.name.endswith(("_token", "_key", "database_url")), row.name)


class CheckTests(SynchronousTestCase):
    """What can't work together."""

    def test_room_for_requests_files(self) -> None:
        """A worker's bounds on requests' files are the disk's unless they are set; none at all is refused (LOAD-23)."""
        unset = worker()
        self.assertEqual((unset.request_files_limit, unset.request_files_free), (None, None))
        told = worker(LOCALAI_REQUEST_FILES_LIMIT="2GiB", LOCALAI_REQUEST_FILES_FREE="0")
        self.assertEqual((told.request_files_limit, told.request_files_free), (2 * 1024**3, 0))
        with self.assertRaises(UserMistake):
            worker(LOCALAI_REQUEST_FILES_LIMIT="0")

    def test_value_errors_name_their_source(self) -> None:
        """A value that can't be read is refused with the name of the flag, variable or key it came from."""
        for got, where in (
            (lambda: frontend({"route-wait": "5"}), "--route-wait"),
            (lambda: frontend({}, {"LOCALAI_ROUTE_WAIT": "5"}), "LOCALAI_ROUTE_WAIT"),
            (lambda: frontend(yaml="route_wait: 5"), "route_wait in the configuration file"),
            (lambda: frontend({}, {"LOCALAI_UPLOAD_LIMIT": "0"}), "LOCALAI_UPLOAD_LIMIT"),
        ):
            self.assertTrue(str(self.assertRaises(UserMistake, got)).startswith(where))

    def test_missing(self) -> None:
        """A frontend without database and a worker without frontend say which variable to set."""
        error = self.assertRaises(UserMistake, resolve, FrontendSettings, {}, {}, read_file=no_file)
        self.assertIn("LOCALAI_AUTH_DATABASE_URL", str(error))
        for settings_type in (WorkerSettings, AgentSettings):
            error = self.assertRaises(UserMistake, resolve, settings_type, {}, {}, read_file=no_file)
            self.assertIn("LOCALAI_REGISTER_TO", str(error))

    def test_demanded_token(self) -> None:
        """With an authentication switch on, a missing registration token stops the start."""
        for name in ("LOCALAI_REGISTRATION_REQUIRE_AUTH", "LOCALAI_DISTRIBUTED_REQUIRE_AUTH"):
            self.assertRaises(UserMistake, frontend, {}, {name: "true"})
            self.assertRaises(UserMistake, worker, **{name: "true"})
            frontend({}, {name: "true", "LOCALAI_REGISTRATION_TOKEN": "t"})

    def test_tunnel_switch(self) -> None:
        """LOCALAI_WORKER_TUNNEL=false stops the worker: there is no other way to reach it."""
        self.assertIn(
            "LOCALAI_WORKER_TUNNEL", str(self.assertRaises(UserMistake, worker, LOCALAI_WORKER_TUNNEL="false"))
        )

    def test_ports(self) -> None:
        """Only the port of the old address options counts; a range that ends before it begins is refused."""
        self.assertEqual(worker(LOCALAI_SERVE_ADDR="0.0.0.0:50051").base_port, 50051)
        self.assertEqual(worker(LOCALAI_ADDR="gpu:21000").base_port, 21000)
        self.assertEqual(worker(LOCALAI_HTTP_ADDR="0.0.0.0:0").http_port, 0)
        error = self.assertRaises(UserMistake, worker, LOCALAI_GRPC_MAX_PORT="19000")
        self.assertIn("LOCALAI_GRPC_MAX_PORT", str(error))
        self.assertRaises(UserMistake, worker, LOCALAI_SERVE_ADDR=":80")

    def test_drain(self) -> None:
        """A lame duck longer than the whole shutdown is refused."""
        self.assertRaises(UserMistake, frontend, {}, {"LOCALAI_LAME_DUCK": "40s"})

    def test_paths_are_absolute(self) -> None:
        """Relative folders count from the directory the daemon runs in."""
        got = frontend({"models-path": "m", "data-path": "/var/d"}, cwd="/srv").settings
        self.assertEqual((got.models_path, got.data_path), ("/srv/m", "/var/d"))


class BrokerTests(SynchronousTestCase):
    """What the old broker needed."""

    def test_accepted_and_silent(self) -> None:
        """Every old broker option is taken by all three daemons, changes nothing and warns of nothing (WALK-20)."""
        needed = {**DATABASE, "LOCALAI_REGISTER_TO": "http://f:1"}
        for settings_type in ALL:
            silent = [name for name in settings_type.accepted if not name.warn]
            plain = resolve(settings_type, {}, needed, read_file=no_file)
            flags = {name.flag: "/no/such/file" for name in silent}
            environ = {name.env: "nats://127.0.0.1:1" for name in silent}
            yaml = "".join(f"{name.key}: x\n" for name in silent)
            loaded = resolve(settings_type, flags, {**needed, **environ}, yaml, read_file=no_file)
            self.assertEqual(loaded, plain)

    def test_names(self) -> None:
        """The broker's names are those of the old programs (WALK-20)."""
        suffixes = "URL ACCOUNT_SEED SERVICE_JWT SERVICE_SEED WORKER_JWT_TTL REQUIRE_AUTH TLS_CA TLS_CERT TLS_KEY"
        for settings_type in ALL:
            known = {name.env: name.flag for name in settings_type.accepted}
            for suffix in suffixes.split():
                self.assertEqual(known[f"LOCALAI_NATS_{suffix}"], f"nats-{suffix.lower().replace('_', '-')}")

    def test_other_options_without_effect_say_so(self) -> None:
        """An old option that would do something elsewhere is taken, and the log says that it has no effect."""
        got = frontend({}, {"LOCALAI_GALLERIES": "s3://x", "LOCALAI_DISTRIBUTED_SHARED_MODELS": "false"})
        self.assertEqual(got.warnings, ("LOCALAI_GALLERIES is accepted and has no effect in this version",))

    def test_no_name_stands_twice(self) -> None:
        """No flag and no variable of a daemon means two things."""
        for settings_type in ALL:
            rows = options_of(settings_type)
            flags = [row.flag for row in rows] + [name.flag for name in settings_type.accepted]
            variables = [row.env for row in rows] + [name.env for name in settings_type.accepted]
            self.assertEqual(len(flags), len(set(flags)))
            # LOCALAI_AGENT_SUBJECT and _QUEUE had two flags each in the old programs.
            self.assertLessEqual(len(variables) - len(set(variables)), 2)
