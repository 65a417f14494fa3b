-- Loaded copies of models on nodes.

-- name: loaded
-- Replicas of a model that may take a request: loaded, on an approved node that neither drains nor left on purpose. Its
-- health is not asked: a copy on a node that was silent, or whose tunnel is lost, is still the copy to wait for until its
-- way says that it departed; a second one would be loaded inside the grace. Least busy first, then the one unused
-- longest, then the node with most free VRAM.
select m.*, n.name as node_name from node_models m join backend_nodes n on n.id = m.node_id
where m.model_name = %(model)s and m.state = 'loaded'
  and n.approved_at is not null and n.left_at is null and n.status <> 'draining'
  and (%(revision)s::varchar is null or m.config_revision = %(revision)s)
order by m.in_flight, m.last_used, n.available_vram desc, m.node_id, m.replica_index;

-- name: of_model
-- Every replica of a model, whatever its state and its node's.
select m.*, n.name as node_name from node_models m join backend_nodes n on n.id = m.node_id
where m.model_name = %(model)s order by m.node_id, m.replica_index;

-- name: for_node
-- Every replica on a node.
select m.*, n.name as node_name from node_models m join backend_nodes n on n.id = m.node_id
where m.node_id = %(node)s order by m.model_name, m.replica_index;

-- name: all
-- Every replica.
select m.*, n.name as node_name from node_models m join backend_nodes n on n.id = m.node_id
order by m.model_name, m.node_id, m.replica_index;

-- name: get
-- One replica.
select m.*, n.name as node_name from node_models m join backend_nodes n on n.id = m.node_id
where m.node_id = %(node)s and m.model_name = %(model)s and m.replica_index = %(index)s;

-- name: put
-- Record a replica, or where it is now.
-- acts: none
insert into node_models (node_id, model_name, replica_index, address, backend_token, backend_type, state,
    config_revision, loading_by)
values (%(node)s, %(model)s, %(index)s, %(address)s, %(backend_token)s, %(backend_type)s, %(state)s, %(revision)s,
    %(loading_by)s)
on conflict (node_id, model_name, replica_index) do update set
    address = excluded.address, backend_token = excluded.backend_token, backend_type = excluded.backend_type,
    state = excluded.state, config_revision = excluded.config_revision, loading_by = excluded.loading_by,
    in_flight = case when node_models.address = excluded.address then node_models.in_flight else 0 end,
    callers = case when node_models.address = excluded.address then node_models.callers else '{}' end,
    last_used = now(), updated_at = now()
returning *;

-- name: touch
-- The replica was used, or the worker said that it runs.
-- acts: none
update node_models set last_used = now(), updated_at = now()
where node_id = %(node)s and model_name = %(model)s and replica_index = %(index)s;

-- name: begin
-- A request starts on a replica that is still loaded, still at that address. It does not wait for the disk: a count that a
-- crash of the database forgets is put right when the replica's row is renewed.
-- With the frontend whose request it is: the count of one that dies is taken off (instances.sql, beat and arrive).
-- acts: none
update node_models set in_flight = in_flight + 1, last_used = now(),
    callers = case when %(caller)s = '' then callers else jsonb_set(
        callers, array[%(caller)s::text], to_jsonb(coalesce((callers ->> %(caller)s::text)::int, 0) + 1)) end
where node_id = %(node)s and model_name = %(model)s and replica_index = %(index)s and state = 'loaded'
  and (%(address)s::varchar is null or address = %(address)s)
  and set_config('synchronous_commit', 'off', true) is not null;

-- name: end
-- A request ended; the count never falls below zero, and what was taken off already is not taken off again. As with its
-- start, nobody waits for the disk.
-- acts: none
update node_models set last_used = now(),
    in_flight = case when %(caller)s = '' or jsonb_exists(callers, %(caller)s) then greatest(in_flight - 1, 0)
                     else in_flight end,
    callers = case when coalesce((callers ->> %(caller)s::text)::int, 0) > 1
                   then jsonb_set(callers, array[%(caller)s::text], to_jsonb((callers ->> %(caller)s::text)::int - 1))
                   else callers - %(caller)s::text end
where node_id = %(node)s and model_name = %(model)s and replica_index = %(index)s
  and (%(address)s::varchar is null or address = %(address)s)
  and set_config('synchronous_commit', 'off', true) is not null;

-- name: set_state
-- Move a replica to another state.
-- acts: asked
update node_models set state = %(state)s, updated_at = now()
where node_id = %(node)s and model_name = %(model)s and replica_index = %(index)s;

-- name: remove
-- A replica that is really gone; with an address, only that very process.
-- acts: may_reap
delete from node_models
where node_id = %(node)s and model_name = %(model)s and replica_index = %(index)s
  and (%(address)s::varchar is null or address = %(address)s);
