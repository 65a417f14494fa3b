-- What an admin wants of a model: where it may run, in how many copies.

-- name: get
-- One model's row.
select * from model_scheduling_configs where model_name = %(model_name)s;

-- name: all
-- Every row.
select * from model_scheduling_configs order by model_name;

-- name: put
-- Create or replace a model's row; a new wish is tried at once.
-- acts: none
insert into model_scheduling_configs (model_name, node_selector, min_replicas, max_replicas, spread_all, route_policy,
    balance_abs_threshold, balance_rel_threshold, min_prefix_match)
values (%(model_name)s, %(node_selector)s, %(min_replicas)s, %(max_replicas)s, %(spread_all)s, %(route_policy)s,
    %(balance_abs_threshold)s, %(balance_rel_threshold)s, %(min_prefix_match)s)
on conflict (model_name) do update set
    node_selector = excluded.node_selector, min_replicas = excluded.min_replicas, max_replicas = excluded.max_replicas,
    spread_all = excluded.spread_all, route_policy = excluded.route_policy,
    balance_abs_threshold = excluded.balance_abs_threshold, balance_rel_threshold = excluded.balance_rel_threshold,
    min_prefix_match = excluded.min_prefix_match, unsatisfiable_until = null, unsatisfiable_ticks = 0,
    updated_at = now()
returning *;

-- name: delete
-- Forget a model's row.
-- acts: asked
delete from model_scheduling_configs where model_name = %(model_name)s;

-- name: clear_unsatisfiable
-- The fleet changed: every wish is worth another try.
-- acts: none
update model_scheduling_configs set unsatisfiable_until = null, unsatisfiable_ticks = 0
where unsatisfiable_until is not null or unsatisfiable_ticks > 0;
