//! The dashboards in `dist/grafana` and `docs`: each query is asked as Grafana asks it, of a real Prometheus
//! that reads a real `twheel run`, and of ClickHouse's engine with the real schema; each must have
//! an answer.

mod clickhouse;
mod grafana;
mod prometheus;
