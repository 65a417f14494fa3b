-- Every table of the walking cluster. Names and columns: docs/wire and the wire contract §7, internals §1a.
-- All times are the database's own (now()); no column is ever stamped by a client's clock.

create table instances (
    id              varchar(36) primary key,
    advertised_addr varchar(255) not null default '',    -- host:port other frontends dial; '' = can't be dialled
    version         varchar(64) not null default '',
    peer_token_hash varchar(64) not null default '',     -- hex SHA-256
    last_seen       timestamptz not null default now()
);
create index instances_last_seen on instances (last_seen);

create table backend_nodes (
    id                 varchar(36) primary key default gen_random_uuid()::text,
    name               varchar(255) not null unique,
    node_type          varchar(16) not null default 'backend' check (node_type in ('backend', 'agent')),
    address            varchar(512) not null default '',
    http_address       varchar(512) not null default '',
    status             varchar(16) not null default 'pending'
                       check (status in ('pending', 'healthy', 'unhealthy', 'offline', 'draining')),
    approved_at        timestamptz,                      -- approval is this column, never inferred from the status
    token_hash         varchar(64) not null default '',  -- of the registration token it came with
    node_token_hash    varchar(64) not null default '',  -- of the node's own token: its identity
    parked_token_hash  varchar(64) not null default '',  -- of a newcomer under the same name, waiting for approval
    parked_at          timestamptz,
    boot_id            varchar(64) not null default '',
    left_at            timestamptz,                      -- it said good-bye; a later heartbeat does not bring it back
    total_vram         bigint not null default 0,
    available_vram     bigint not null default 0,
    reserved_vram      bigint not null default 0,
    total_ram          bigint not null default 0,
    available_ram      bigint not null default 0,
    total_disk         bigint not null default 0,        -- 0 = unknown; available 0 with a total = full
    available_disk     bigint not null default 0,
    gpu_vendor         varchar(64) not null default '',
    gpu_compute_capability varchar(32) not null default '',
    capability         varchar(64) not null default '',
    max_replicas_per_model int not null default 1,
    max_replicas_per_model_manually_set boolean not null default false,
    vram_budget        varchar(32) not null default '',
    vram_budget_bytes  bigint not null default 0,
    vram_budget_manually_set boolean not null default false,
    api_key_id         varchar(36) not null default '',
    auth_user_id       varchar(36) not null default '',
    last_heartbeat     timestamptz,
    created_at         timestamptz not null default now(),
    updated_at         timestamptz not null default now(),
    constraint pending_until_approved check ((approved_at is null) = (status = 'pending'))
);

create table node_labels (
    id      varchar(36) primary key default gen_random_uuid()::text,
    node_id varchar(36) not null references backend_nodes (id) on delete cascade,
    key     varchar(255) not null,
    value   text not null default '',
    unique (node_id, key)
);

create sequence node_connection_epochs as bigint;
create table node_connections (
    node_id           varchar(36) primary key,
    owner_instance_id varchar(36) not null,              -- '' = nobody
    epoch             bigint not null,                   -- from the sequence: unique, compared for equality only
    connected_at      timestamptz not null,
    disconnected_at   timestamptz
);
create index node_connections_owner on node_connections (owner_instance_id);
create index node_connections_disconnected on node_connections (disconnected_at);

create table node_models (
    id                     varchar(36) primary key default gen_random_uuid()::text,
    node_id                varchar(36) not null references backend_nodes (id) on delete cascade,
    model_name             varchar(255) not null,
    replica_index          int not null default 0 check (replica_index >= 0),
    address                varchar(255) not null default '',  -- loopback on that node: means nothing without node_id
    backend_token          text not null default '',          -- of that backend process
    state                  varchar(16) not null check (state in ('staging', 'loading', 'loaded', 'unloading', 'idle')),
    in_flight              int not null default 0 check (in_flight >= 0),
    last_used              timestamptz not null default now(),
    loading_by             varchar(36) not null default '',
    backend_type           varchar(255) not null default '',
    model_opts_blob        bytea,
    config_revision        varchar(64) not null default '',
    effective_options_hash varchar(64) not null default '',
    cleanup_error          text not null default '',
    cleanup_attempts       int not null default 0,
    cleanup_next_retry_at  timestamptz,
    created_at             timestamptz not null default now(),
    updated_at             timestamptz not null default now(),
    unique (node_id, model_name, replica_index)
);
create index node_models_model on node_models (model_name, state);

create table model_load_infos (
    model_name      varchar(255) primary key,
    backend_type    varchar(255) not null default '',
    model_opts_blob bytea,
    config_revision varchar(64) not null default '',
    created_at      timestamptz not null default now(),
    updated_at      timestamptz not null default now()
);

create table model_scheduling_configs (
    id                    varchar(36) primary key default gen_random_uuid()::text,
    model_name            varchar(255) not null unique,
    node_selector         text not null default '',      -- JSON object in text
    min_replicas          int not null default 0,
    max_replicas          int not null default 0,
    spread_all            boolean not null default false,
    route_policy          varchar(32) not null default '',
    balance_abs_threshold int not null default 0,
    balance_rel_threshold double precision not null default 0,
    min_prefix_match      double precision not null default 0,
    unsatisfiable_until   timestamptz,
    unsatisfiable_ticks   int not null default 0,
    created_at            timestamptz not null default now(),
    updated_at            timestamptz not null default now()
);

create table model_load_jobs (
    tracking_key  varchar(255) primary key,
    attempt       bigint not null default 1,             -- fences a take-over: every write of a job carries it
    state         varchar(16) not null check (state in ('pending', 'installing', 'staging', 'loading', 'failed')),
    owner_replica varchar(36) not null default '',
    node_id       varchar(36) not null default '',
    node_name     varchar(255) not null default '',
    replica_index int not null default 0,
    bytes_sent    bigint not null default 0,
    total_bytes   bigint not null default 0,
    file_index    int not null default 0,
    total_files   int not null default 0,
    last_error    text not null default '',
    started_at    timestamptz,                           -- first byte
    created_at    timestamptz not null default now(),
    updated_at    timestamptz not null default now(),
    last_progress timestamptz not null default now()     -- heartbeat, driven by time
);
create sequence model_load_attempts as bigint;

create table pending_backend_ops (
    id            bigserial primary key,
    node_id       varchar(36) not null references backend_nodes (id) on delete cascade,
    backend       varchar(255) not null check (backend <> ''),
    op            varchar(16) not null check (op in ('install', 'upgrade', 'delete')),
    galleries     text not null default '',
    attempts      int not null default 0,
    last_error    text not null default '',
    next_retry_at timestamptz,
    created_at    timestamptz not null default now(),
    unique (node_id, backend, op)
);

create table bus_messages (
    id         varchar(36) primary key default gen_random_uuid()::text,
    subject    varchar(255) not null,
    payload    bytea not null,
    created_at timestamptz not null default now()
);
create index bus_messages_subject on bus_messages (subject);
create index bus_messages_created on bus_messages (created_at);

create table work_claims (
    id         varchar(36) primary key default gen_random_uuid()::text,
    kind       varchar(32) not null,
    payload    bytea not null,
    claimed_by varchar(64) not null default '',
    claimed_at timestamptz,
    attempts   int not null default 0,
    not_before timestamptz,
    created_at timestamptz not null default now()
);
create index work_claims_kind on work_claims (kind);
create index work_claims_claimed_by on work_claims (claimed_by);
create index work_claims_claimed_at on work_claims (claimed_at);
create index work_claims_not_before on work_claims (not_before);
create index work_claims_created on work_claims (created_at);

-- What code reads of a node: everything but the hashes, with its labels and counts.
create view node_facts as
select n.id, n.name, n.node_type, n.status, n.approved_at is not null as approved,
       n.parked_token_hash <> '' as newcomer_waiting, n.boot_id, n.left_at, n.address, n.http_address,
       n.total_vram, n.available_vram, n.reserved_vram, n.total_ram, n.available_ram, n.total_disk, n.available_disk,
       n.gpu_vendor, n.gpu_compute_capability, n.capability,
       n.max_replicas_per_model, n.max_replicas_per_model_manually_set,
       n.vram_budget, n.vram_budget_bytes, n.vram_budget_manually_set,
       n.last_heartbeat, n.created_at, n.updated_at,
       coalesce((select jsonb_object_agg(l.key, l.value) from node_labels l where l.node_id = n.id), '{}') as labels,
       (select count(*) from node_models m where m.node_id = n.id and m.state = 'loaded') as model_count,
       (select coalesce(sum(m.in_flight), 0)::bigint from node_models m where m.node_id = n.id) as in_flight_count
from backend_nodes n;
