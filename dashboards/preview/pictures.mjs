/**
 * Draw boards as PNG files: Grafana's panel components in a headless Chromium, the data from a real Prometheus.
 *
 *     node pictures.mjs --prometheus http://127.0.0.1:9090 --from 2026-11-21T10:00:00Z --to 2026-11-21T10:30:00Z \
 *         --out /tmp/pictures ../generated/boards/*.json
 *
 * It prints each panel that is empty or wrong. A time is a date or a number of seconds since 1970.
 */
import { build } from 'esbuild';
import { chromium } from 'playwright-core';
import { existsSync } from 'node:fs';
import { mkdir, readFile, writeFile } from 'node:fs/promises';
import { basename, dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

import { Prometheus, annotationMarks, panelAnswers, seconds, variables } from './queries.mjs';

const HERE = dirname(fileURLToPath(import.meta.url));
const ICONS = join(HERE, 'node_modules/@grafana/ui/dist/public/img/icons/');
const BROWSERS = ['/usr/bin/chromium', '/usr/bin/chromium-browser', '/usr/bin/google-chrome'];
const PAGE = 'http://preview.invalid/';
const WIDTH = 1600;
const LOOKS = 20;
const USE = `Use: node pictures.mjs [options] BOARD.json...
  --prometheus URL    default http://127.0.0.1:9090
  --from, --to TIME   default the last hour
  --scrape DURATION   how often Prometheus scrapes, default 15s
  --set NAME=VALUES   the value of a variable, several with commas between; again for each variable
  --rows              open the collapsed rows
  --out DIR           default the current folder`;

const OPTIONS = {
  prometheus: { type: 'string', default: 'http://127.0.0.1:9090' },
  from: { type: 'string' },
  to: { type: 'string' },
  scrape: { type: 'string', default: '15s' },
  set: { type: 'string', multiple: true, default: [] },
  rows: { type: 'boolean', default: false },
  out: { type: 'string', default: '.' },
};

function moment(text, otherwise) {
  if (text === undefined) return otherwise;
  const time = /^\d+(\.\d+)?$/.test(text) ? Number(text) : Date.parse(text) / 1000;
  if (Number.isNaN(time)) throw new Error(`"${text}" is no time: write 2026-11-21T10:00:00Z or seconds since 1970`);
  return Math.floor(time);
}

/** The page's script and style, as one file each. */
async function bundle() {
  const { outputFiles } = await build({
    entryPoints: [join(HERE, 'page/app.jsx')],
    outdir: '/',
    bundle: true,
    write: false,
    jsx: 'automatic',
    logLevel: 'error',
    define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
    alias: { 'react-custom-scrollbars-2': join(HERE, 'page/scrollbars.js') },
    loader: { '.ttf': 'empty', '.woff': 'dataurl', '.woff2': 'dataurl', '.svg': 'dataurl' },
  });
  const text = (ending) => outputFiles.find((file) => file.path.endsWith(ending)).text;
  return { 'app.js': text('.js'), 'app.css': text('.css') };
}

/** Answer the page's requests from this folder; no server runs and nothing else is reached. */
async function serve(page, files) {
  const html = `<!doctype html><meta charset="utf-8"><style>body { margin: 0 }</style><link rel="stylesheet" href="app.css"><div id="board"></div><script src="app.js"></script>`;
  const icons = `${PAGE}public/build/img/icons/`;
  await page.route('**/*', async (route) => {
    const url = route.request().url();
    if (url === PAGE) return route.fulfill({ contentType: 'text/html', body: html });
    const name = url.slice(PAGE.length);
    if (files[name])
      return route.fulfill({ contentType: name.endsWith('.css') ? 'text/css' : 'text/javascript', body: files[name] });
    const icon = join(ICONS, url.slice(icons.length));
    if (url.startsWith(icons) && existsSync(icon)) return route.fulfill({ contentType: 'image/svg+xml', path: icon });
    return route.abort();
  });
}

/** The page once it looks the same twice: legends and tables measure themselves, draw again, without an event. */
async function settled(page, path) {
  let last;
  for (let look = 0; look < LOOKS; look++) {
    const seen = await page.screenshot({ fullPage: true });
    if (last?.equals(seen)) return seen;
    last = seen;
  }
  throw new Error(`${path} looked different each of ${LOOKS} times`);
}

async function readBoard(path) {
  try {
    return JSON.parse(await readFile(path, 'utf8'));
  } catch (error) {
    throw new Error(`${path} is no board: ${error.message}`);
  }
}

async function picture(browser, files, path, out, asked) {
  const board = await readBoard(path);
  const { prometheus, range, scrape, chosen, openRows } = asked;
  const values = await variables(board, prometheus, range, chosen);
  const answers = await panelAnswers(board, values, prometheus, range, scrape);
  const marks = await annotationMarks(board, values, prometheus, range, scrape);

  const page = await browser.newPage({ viewport: { width: WIDTH, height: 900 } });
  page.on('pageerror', (error) => console.error(`${path}: ${error.message}`));
  await serve(page, files);
  await page.goto(PAGE);
  await page.evaluate((props) => window.draw(props), {
    board,
    values,
    answers,
    marks,
    ...range,
    openRows,
    width: WIDTH,
  });
  const file = join(out, `${board.uid ?? basename(path, '.json')}.png`);
  await writeFile(file, await settled(page, path));
  const complaints = await page.evaluate(() => window.complaints);
  await page.close();
  console.log(`${file}: ${Object.keys(answers).length} panels`);
  for (const complaint of new Set(complaints)) console.log(`  ${complaint}`);
}

async function main() {
  const { values: options, positionals: boards } = parseArgs({ options: OPTIONS, allowPositionals: true });
  if (boards.length === 0) throw new Error(`No board was named.\n${USE}`);
  const executablePath = process.env.CHROMIUM ?? BROWSERS.find(existsSync);
  if (!executablePath)
    throw new Error('No Chromium found: install one (apt-get install chromium) or name it in CHROMIUM');
  const to = moment(options.to, Math.floor(Date.now() / 1000));
  const asked = {
    prometheus: new Prometheus(options.prometheus),
    range: { from: moment(options.from, to - 3600), to },
    scrape: seconds(options.scrape),
    chosen: Object.fromEntries(options.set.map((one) => one.split(/=(.*)/s))),
    openRows: options.rows,
  };
  await asked.prometheus.ask('query', { query: '1' });
  await mkdir(options.out, { recursive: true });
  const files = await bundle();
  const browser = await chromium.launch({ executablePath, args: ['--force-color-profile=srgb'] });
  try {
    for (const board of boards) await picture(browser, files, board, options.out, asked);
  } finally {
    await browser.close();
  }
}

main().catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
