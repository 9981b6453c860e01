// The languages of the vendored highlighter, under the names by which they refer to each other.

import bash from "./vendor/highlight/bash.js";
import c from "./vendor/highlight/c.js";
import css from "./vendor/highlight/css.js";
import diff from "./vendor/highlight/diff.js";
import docker from "./vendor/highlight/docker.js";
import go from "./vendor/highlight/go.js";
import html from "./vendor/highlight/html.js";
import ini from "./vendor/highlight/ini.js";
import java from "./vendor/highlight/java.js";
import js from "./vendor/highlight/js.js";
import jsdoc from "./vendor/highlight/jsdoc.js";
import json from "./vendor/highlight/json.js";
import lua from "./vendor/highlight/lua.js";
import make from "./vendor/highlight/make.js";
import md from "./vendor/highlight/md.js";
import plain from "./vendor/highlight/plain.js";
import py from "./vendor/highlight/py.js";
import regex from "./vendor/highlight/regex.js";
import rs from "./vendor/highlight/rs.js";
import sql from "./vendor/highlight/sql.js";
import todo from "./vendor/highlight/todo.js";
import toml from "./vendor/highlight/toml.js";
import ts from "./vendor/highlight/ts.js";
import uri from "./vendor/highlight/uri.js";
import xml from "./vendor/highlight/xml.js";
import yaml from "./vendor/highlight/yaml.js";

export { tokenizeWith } from "./vendor/highlight/tokenize.js";
export const languages = {
  bash,
  c,
  css,
  diff,
  docker,
  go,
  html,
  ini,
  java,
  js,
  jsdoc,
  json,
  lua,
  make,
  md,
  plain,
  py,
  regex,
  rs,
  sql,
  todo,
  toml,
  ts,
  uri,
  xml,
  yaml,
};
