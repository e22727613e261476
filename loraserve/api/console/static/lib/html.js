// Preact and htm, as the views use them. Text is always a text node: nothing here parses HTML.
import { h, render } from "../vendor/preact.js";
import { useCallback, useEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
import htm from "../vendor/htm.js";

const html = htm.bind(h);

export { html, render, useCallback, useEffect, useMemo, useRef, useState };
